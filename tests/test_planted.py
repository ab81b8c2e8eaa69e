"""A folder that was downloaded is data: neither programs nor their children run its files."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from gguf_files import draw_tensors, write_gguf
from serving import free_port, until

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
        ("generate model.gguf --question !! --max-new-tokens 1", ""),
        pytest.param("chat model.gguf --max-new-tokens 1", "!!\n", marks=pytest.mark.slow),
        ("inspect model.gguf", ""),
    ],
)
def test_no_program_runs_code_of_the_working_folder(folder, tmp_path, words, typed) -> None:
    command, options = poss(folder, tmp_path, *words.split())
    result = subprocess.run(command, input=typed, capture_output=True, text=True, **options)
    assert_nothing_ran(folder)
    assert result.returncode == 0, result.stderr


def test_the_process_that_tries_grammars_runs_no_code_of_the_working_folder(folder, tmp_path):
    port = str(free_port())
    small = "--max-length 64 --batch-size 1 --max-logprobs 0".split()
    command, options = poss(folder, tmp_path, "serve", "model.gguf", "--port", port, *small)
    with (
        subprocess.Popen(command, stderr=subprocess.DEVNULL, **options) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client,
    ):
        try:
            until(lambda: is_up(client), seconds=120)
            body = {"prompt": "!", "max_tokens": 2, "structured_outputs": {"choice": ["!"]}}
            reply = client.post("/v1/completions", json=body)
        finally:
            server.terminate()
    assert_nothing_ran(folder)
    assert reply.status_code == 200, reply.text


def poss(folder: Path, cache: Path, *words: str) -> tuple[list[str], dict[str, Any]]:
    """A command and the options of its process, which works in a downloaded folder."""
    # Installed, `poss` has its own folder in front of the import path, as -P leaves it.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "POSS_JAX_CACHE": str(cache)}
    command = [sys.executable, "-P", "-m", "poss_jax", *words]
    return command, {"cwd": folder, "env": environment}


def is_up(client: httpx.Client) -> bool:
    with suppress(httpx.TransportError):
        return client.get("/health").status_code == 200
    return False


def assert_nothing_ran(folder: Path) -> None:
    ran = folder / "ran"
    assert not ran.exists(), ran.read_text()
