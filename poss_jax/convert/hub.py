"""Fetching a checkpoint from the Hugging Face Hub; every way it fails is one line that helps.

`HF_TOKEN`, `HF_HOME`, `HF_HUB_OFFLINE` and `HF_ENDPOINT` are read by `huggingface_hub` itself.
"""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from poss_jax.checkpoint import check_file
from poss_jax.config import UserError

_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT_SHA1 = re.compile(r"[0-9a-f]{40}")


def fetch_snapshot(hub_id: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Downloads the files that match, or finds them in the cache.

    Args:
      hub_id: owner/name.
      revision: branch, tag or commit; None for the main branch.
      patterns: of file names in the top folder.

    Returns:
      The snapshot's folder in the cache; its name is the commit.

    Raises:
      UserError: anything that keeps the files from coming.
    """
    import huggingface_hub  # here, because it is slow to import and folders do not need it

    try:
        return Path(
            huggingface_hub.snapshot_download(
                hub_id, revision=revision, allow_patterns=list(patterns), ignore_patterns=["*/*"]
            )
        )
    except Exception as error:  # of several families: the Hub's, the HTTP client's, the system's
        raise UserError(_explain(hub_id, revision, error)) from error


def fetch_headers(hub_id: str, revision: str) -> dict[str, tuple[str, tuple[int, ...], str]] | None:
    """Fetches the headers of a model's safetensors files.

    Args:
      hub_id: owner/name.
      revision: commit.

    Returns:
      File, shape and safetensors' name of the type by key; None where there are no such files, or
      where HF_HUB_OFFLINE is set.

    Raises:
      UserError: anything that keeps them from coming.
    """
    import huggingface_hub
    from huggingface_hub import constants, errors

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        found = huggingface_hub.get_safetensors_metadata(hub_id, revision=revision)
    except errors.NotASafetensorsRepoError:
        return None
    except Exception as error:  # as in fetch_snapshot
        raise UserError(_explain(hub_id, revision, error)) from error
    return {
        key: (file, tuple(info.shape), info.dtype)
        for file, header in found.files_metadata.items()
        for key, info in header.tensors.items()
    }


def check_blob(path: Path) -> None:
    """Compares a file of the Hub's cache with its checksum; other files pass.

    The cache names a file's contents by what the Hub says: SHA-256 for large files, git's SHA-1 for
    small ones.

    Raises:
      UserError: the contents are others.
    """
    blob = path.readlink() if path.is_symlink() else Path()
    if blob.parent.name != "blobs":
        return
    if _SHA256.fullmatch(blob.name):
        check_file(path, blob.name, "the Hub")
    elif _GIT_SHA1.fullmatch(blob.name):
        content = path.read_bytes()
        digest = hashlib.sha1(b"blob %d\0" % len(content), usedforsecurity=False)
        digest.update(content)
        if digest.hexdigest() != blob.name:
            raise UserError(
                f"{path}: the Hub says git SHA-1 {blob.name}, got {digest.hexdigest()}; the file "
                "is damaged, delete it from the cache and fetch it again"
            )


def _explain(hub_id: str, revision: str | None, error: Exception) -> str:
    from huggingface_hub import constants, errors

    shown = hub_id if revision is None else f"{hub_id} at revision {revision}"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{hub_id} is gated: accept its terms on the model's page, and set HF_TOKEN to a "
            "token of the same account"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"no folder {hub_id} here, and the Hub shows no such model; check the name, and set "
            "HF_TOKEN if it is private"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the Hub has no {shown}; give one of its branches, tags or commits"
    if isinstance(error, errors.LocalEntryNotFoundError) and constants.HF_HUB_OFFLINE:
        return (
            f"HF_HUB_OFFLINE is set, and the cache {constants.HF_HUB_CACHE} does not hold all of "
            f"{shown}; unset it, or fetch the model first"
        )
    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else None
    reason = " ".join(str(cause or error).split())[:300] or type(cause or error).__name__
    return (
        f"no folder {hub_id} here, and {shown} cannot be fetched from {constants.ENDPOINT} "
        f"({reason}); check the network, the space left in {constants.HF_HUB_CACHE}, and HF_TOKEN"
    )
