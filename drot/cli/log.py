"""What --log and --progress ask for: a file with messages and progress, and the form of the progress."""

import logging
import sys
from pathlib import Path

from drot.core import torchrun
from drot.core.errors import UserError

#: the values of --progress. auto: bars on a terminal, otherwise lines.
FORMS = ("auto", "json", "none")


class Log:
    """The log file of a command, if it has one, and the form of its progress on stderr."""

    def __init__(self) -> None:
        self.form = FORMS[0]
        self._file: logging.FileHandler | None = None

    def choose(self, form: str) -> None:
        """Sets the form of the progress. Raises UserError unless `form` is one of FORMS."""
        if form not in FORMS:
            raise UserError(f"`progress` must be one of {', '.join(FORMS)}; got {form!r}")
        self.form = form

    def open(self, file: Path) -> None:
        """Appends the messages of drot's logger, and what `line` gets, to `file`, on rank 0 alone."""
        if torchrun.rank():
            return
        try:
            self._file = logging.FileHandler(file, encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {file} ({error.strerror}): name another file as `log`") from None
        self._file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        logger = logging.getLogger("drot")
        logger.addHandler(self._file)
        if logging.lastResort is not None:  # Python uses it only for a logger without handlers
            logger.addHandler(logging.lastResort)

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def line(self, text: str) -> None:
        """Appends a line to the file, if there is one."""
        if self._file is not None:
            self._file.emit(logging.makeLogRecord({"msg": text}))

    def close(self) -> None:
        """Ends the file."""
        if self._file is not None:
            logger = logging.getLogger("drot")
            logger.removeHandler(self._file)
            if logging.lastResort is not None:
                logger.removeHandler(logging.lastResort)
            self._file.close()
            self._file = None


#: of the command that runs
LOG = Log()


def tell(text: str) -> None:
    """Prints a message to stderr and to the log."""
    print(text, file=sys.stderr)
    LOG.line(text)
