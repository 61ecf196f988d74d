"""What `drot serve` needs beyond drot itself: the packages of its pip extra, and a newer transformers."""

from importlib.metadata import version
from importlib.util import find_spec

from drot.core.errors import UserError

PACKAGES = ("fastapi", "uvicorn", "openai")
#: the first transformers whose server batches without a download of attention kernels from the hub
OLDEST_TRANSFORMERS = (5, 20)


def check_requirements() -> None:
    """Raises UserError with the pip command if a package of the extra `serve` is missing or too old."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise UserError(
            f"a server needs the package {' and '.join(missing)}: pip install {' '.join(missing)}"
        )
    found = version("transformers")
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST_TRANSFORMERS:
        oldest = ".".join(map(str, OLDEST_TRANSFORMERS))
        raise UserError(
            f"a server needs transformers {oldest} or newer, got {found}: "
            f"pip install 'transformers>={oldest},<6'"
        )
