"""A folder that was downloaded is data: neither programs nor their children run its files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from gguf_files import draw_tensors, write_gguf

ROOT = Path(__file__).parent.parent
PLANTED = "filelock numpy jax poss_jax transformers tokenizers jinja2 json struct pickle".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file with a chat template, beside modules that say when they run."""
    folder = tmp_path_factory.mktemp("downloaded")
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    write_gguf(
        folder / "model.gguf",
        "llama",
        draw_tensors("llama"),
        more=lambda writer: writer.add_chat_template(template),
    )
    for name in PLANTED:
        code = f"open({str(folder / 'ran')!r}, 'a').write('{name} ')\nraise ImportError"
        (folder / f"{name}.py").write_text(code)
    return folder


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        (["generate", "model.gguf", "--question", "!!"], ""),
        (["chat", "model.gguf"], "!!\n"),
        (["inspect", "model.gguf"], ""),
    ],
    ids=["generate", "chat", "inspect"],
)
def test_no_program_runs_code_of_the_working_folder(
    folder: Path, tmp_path: Path, words: list[str], typed: str
) -> None:
    limit = [] if words[0] == "inspect" else ["--max-new-tokens", "1"]
    # Installed, `poss` has its own folder in front of the import path, as -P leaves it.
    result = subprocess.run(
        [sys.executable, "-P", "-m", "poss_jax", *words, *limit],
        input=typed,
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "POSS_JAX_CACHE": str(tmp_path)},
    )
    ran = folder / "ran"
    assert not ran.exists(), ran.read_text()
    assert result.returncode == 0, result.stderr
