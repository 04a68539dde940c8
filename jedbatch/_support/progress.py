"""Progress bars, by tqdm where it is installed."""

from collections.abc import Iterable
from typing import Any

try:
    from tqdm import tqdm
except ModuleNotFoundError:
    tqdm = None


def progress_bar(steps: Iterable[Any], title: str, shown: bool) -> Iterable[Any]:
    """Returns the steps, with a progress bar on stderr while they are gone through.

    Raises:
      ModuleNotFoundError: a bar is to be shown and tqdm is not installed.
    """
    if not shown:
        return steps
    if tqdm is None:
        raise ModuleNotFoundError(
            "`progress=True` shows a progress bar with tqdm, which is not installed; write "
            "`pip install 'jedbatch[models]'` or `pip install tqdm`, or leave `progress` out."
        )
    return tqdm(steps, desc=title)
