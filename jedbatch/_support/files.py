"""Files that are written whole or not at all, and JSON that is read.

What is saved is written beside its place and put there at the end, so that a full disk, an
interrupt or a crash leaves the file that was there before, and no part of the new one.
"""

import contextlib
import json
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from jedbatch import checks


@contextlib.contextmanager
def replacing(who: str, path: Any) -> Iterator[IO[bytes]]:
    """A file to write, which takes the place of the one at `path` when the block is left.

    A link is followed. What is no regular file, such as `/dev/stdout`, cannot be replaced and is
    written to.

    Args:
      who: the public function that saves, for messages.
      path: where the file will be.
    """
    place = os.path.realpath(checks.path(who, path))
    try:
        mode = os.stat(place).st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None and not stat.S_ISREG(mode):
        with open(place, "wb") as file:
            yield file
        return
    if mode is not None and not os.access(place, os.W_OK):
        raise PermissionError(f"`{who}` may not write to {checks.brief(path)}: it is read-only")
    folder = os.path.dirname(os.fsdecode(place))
    beside = os.path.join(folder, f".jedbatch-{secrets.token_hex(8)}")
    try:
        try:
            file = open(beside, "xb")  # noqa: SIM115
        except OSError as error:  # which should not name a file that the user did not
            error.filename = os.fspath(path)
            raise
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            os.chmod(beside, stat.S_IMODE(mode))
        os.replace(beside, place)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)


def write_text(who: str, path: object, text: str) -> None:
    """Writes a text, in UTF-8, whole or not at all."""
    with replacing(who, path) as file:
        file.write(text.encode("utf-8"))


def read_text(who: str, path: Any) -> tuple[str, str]:
    """Returns (the text of a file, its name as messages spell it)."""
    name = os.fsdecode(checks.path(who, path))
    return Path(name).read_text(encoding="utf-8", errors="replace"), repr(name)


def content_of(text: str, written_as: str) -> dict[str, Any]:
    """Returns the object that JSON describes; `ValueError` if its `format` is another one."""
    content = json.loads(text)
    if not isinstance(content, dict) or content.get("format") != written_as:
        version = content.get("format") if isinstance(content, dict) else content
        raise ValueError(f"its format is {checks.brief(version)}, not {written_as!r}")
    return content


@contextlib.contextmanager
def reading(what: str, source: str) -> Iterator[None]:
    """Turns errors about the content of a file into one that names it.

    Args:
      what: the class whose `save` writes such files.
      source: the name of the file, or what else was read.
    """
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{error} is missing or unknown" if isinstance(error, KeyError) else error
        raise ValueError(
            f"`{what}.load` cannot read {source}: {checks.cut(reason)}. It expects a file written "
            f"by `{what}.save`."
        ) from error
