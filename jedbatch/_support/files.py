"""Files that are written whole or not at all.

What is saved is written beside its place and put there at the end, so that a full disk, an
interrupt or a crash leaves the file that was there before, and no part of the new one.
"""

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
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
