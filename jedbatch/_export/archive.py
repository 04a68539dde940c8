"""One file with everything in it: a header as JSON, programs as StableHLO, and constants.

The file is a zip archive that holds no pickle. Checksums are compared when it is read, and its
version is looked at first, so that a file that a later version of this package wrote says so.
"""

import io
import json
import zipfile
from collections.abc import Mapping
from typing import Any

from jedbatch import checks

FORMAT = "jedbatch exported model"
VERSION = 3  # raised by what a reader of the version before would misunderstand
HEADER = "header.json"
MAX_BYTES, MAX_RATIO = 1 << 26, 100  # of what is unpacked
EPOCH = (1980, 1, 1, 0, 0, 0)  # for all members, so that equal ones are equal files


def pack(header: Mapping[str, Any], members: Mapping[str, bytes]) -> bytes:
    """Returns the bytes of a file."""
    written = io.BytesIO()
    content = {"format": FORMAT, "version": VERSION, **header}
    with zipfile.ZipFile(written, "w") as archive:
        everything = {HEADER: json.dumps(content).encode(), **members}
        for name, data in everything.items():
            info = zipfile.ZipInfo(name, EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, data)
    return written.getvalue()


def unpack(data: bytes, source: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Returns the header and the other members of a file; `source` names it in messages.

    Raises:
      ValueError: it is damaged, something else, or of a later version.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            total = sum(info.file_size for info in archive.infolist())
            if total > max(MAX_BYTES, MAX_RATIO * len(data)):
                raise ValueError(f"it unpacks to {total:,} bytes, and has {len(data):,}")
            members = {info.filename: archive.read(info) for info in archive.infolist()}
        header = json.loads(members.pop(HEADER))
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise ValueError("it has another format")
        version = header["version"]
    except Exception as error:
        raise unreadable(source, error) from error
    if version != VERSION:
        writer = checks.cut(header.get("jedbatch", "unknown"), 60)
        raise ValueError(
            f"`Exported.load` cannot read {source}: it is of version {checks.brief(version)}, "
            f"written by jedbatch {writer}, and this jedbatch reads version {VERSION}. Install a "
            "version of jedbatch that reads it, or export the model again with this one."
        )
    return header, members


def unreadable(source: str, error: Exception) -> ValueError:
    """The error that says which file cannot be read, and why."""
    reason = checks.cut(error) or type(error).__name__
    reason = f"no {reason}" if isinstance(error, KeyError) else reason
    return ValueError(
        f"`Exported.load` cannot read {source}: {reason.rstrip('.')}. It expects a whole file that "
        "`Exported.save` wrote."
    )
