"""The options of a command: from its docstring, and from the fields of the configuration.

A section of the docstring is a panel of `--help`. An entry of it is a parameter of the command, with the form
of its value where that needs one: `device [auto|cpu]: Device to use.` Values without a capital letter in such
a form are completed by the shell. An entry without a text has that of COMMON_OPTIONS.
"""

import inspect
import os
import re
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from drot.cli.commands import without_flag_values
from drot.cli.log import FORMS, Form
from drot.cli.messages import flag, in_options
from drot.config import SEQLEN, CalibrationConfig, WeightFormat
from drot.config.settings import description_of, fields_of
from drot.core.hub import check_model_name
from drot.core.torchrun import rank
from drot.core.validation import choices_of, members_of
from drot.text.names import check_sources, local_file

#: the sources of a text, for the help of --calibration and --text
SOURCES = description_of(CalibrationConfig, "source")
ANY_DTYPE = "[auto|float32|bfloat16|float16]"
#: parameter of several commands, or with values of the program → the form of its value, and its help
COMMON_OPTIONS = {
    "out": ("", "Folder to write. It must be new or empty."),
    "device": (
        "[auto|cpu|cuda|cuda:N]",
        "Device to use. auto is the first GPU, or the CPU if there is no GPU.",
    ),
    "dtype": (
        ANY_DTYPE,
        "Dtype of the computation. auto is the dtype of the checkpoint on a GPU, and float32 on a CPU.",
    ),
    "save_dtype": (ANY_DTYPE, "Dtype of the saved weights. auto is the dtype of MODEL."),
    "format": (
        f"[{'|'.join(typing.get_args(WeightFormat))}]",
        "Format of the saved weights. packed stores the values and positions of 2:4 weights, in 9/16 of the "
        "bytes of bf16; dense stores all weights, with their zeros.",
    ),
    "seqlen": (
        "",
        "Length in tokens of the windows into which a text is cut, without overlap. "
        f"Default: {SEQLEN}, or what the model reads if that is less.",
    ),
    "text_column": ("", description_of(CalibrationConfig, "text_column")),
    "as_json": ("", "Print the result as one JSON object on stdout. Infinity and NaN become null."),
}


def check_checkpoint(folder: str) -> None:
    """Raises UserError if there is no such folder."""
    if not os.path.exists(folder):
        from drot.checkpoint.manifest import read_any_manifest

        read_any_manifest(folder)


#: Form of a value → what checks it before torch and transformers are imported, which takes seconds
CHECKS: dict[str, Callable[[str], object]] = {
    "DIR": check_checkpoint,
    "MODEL": check_model_name,
    "MODEL...": check_model_name,
    "[c4|own|ORG/NAME|PATH]": check_sources,
    "[c4|ORG/NAME|PATH]": check_sources,
    "[ORG/NAME|PATH]": lambda text: local_file(text, "test"),
}
SECTION = re.compile(r"^(\w+):\n", re.MULTILINE)
ENTRY = re.compile(r"^ {4}(\w+)(?: (\S+))?:((?:.*\n)(?: {8}.*\n)*)", re.MULTILINE)


class Command(TyperCommand):
    #: the parameters of the options that --help shows, of a command that has --help-all; () is all
    first: Sequence[str] = ()

    def get_params(self, ctx: Any) -> list[Any]:
        return without_flag_values(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        shown = self.params
        if self.first:
            keep = {*self.first, "help_all"}
            self.params = [p for p in shown if p.param_type_name == "argument" or p.name in keep]
        try:
            super().format_help(ctx, formatter)
        finally:
            self.params = shown

    def help_option(self, option: str | None) -> str:
        """`--help-all` if an option, such as `--lr`, is not in the help of `--help`."""
        shown = {name for param in self.params if param.name in self.first for name in param.opts}
        return "--help-all" if self.first and option and option not in shown else "--help"


def _acting(name: str, default: Any, kind: Any, act: Callable[..., None], **shown: Any) -> inspect.Parameter:
    """An option that is no argument of the command: `act` gets the context and the value of the option."""
    option = typer.Option(flag(name), callback=act, expose_value=False, **shown)
    kept = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kept, default=default, annotation=Annotated[kind, option])


def _show_all(ctx: typer.Context, given: bool) -> None:
    if given:
        assert isinstance(ctx.command, Command)
        ctx.command.first = ()
        print(ctx.get_help())
        raise typer.Exit


def _show_progress(ctx: typer.Context, form: str) -> None:
    Form.choose(form)


HELP_ALL = _acting("help_all", False, bool, _show_all, is_eager=True, help="Show all options and exit.")
#: the option of the commands that show progress
PROGRESS = _acting(
    "progress",
    FORMS[0],
    str,
    _show_progress,
    metavar=f"[{'|'.join(FORMS)}]",
    autocompletion=lambda: list(FORMS),
    rich_help_panel="Run",
    help="Progress on stderr. auto: bars on a terminal, otherwise lines. json: one JSON object a line, "
    "with the seconds since the start, phase, layer, layers, step, steps, loss, and name, the model "
    "among several. In the phases read and tokenize a step is a character. none: no progress.",
)


def command_of(
    name: str,
    function: Callable[..., None],
    settings: Sequence[inspect.Parameter] = (),
    first: Sequence[str] = (),
    progress: bool = False,
) -> Any:
    """The command `drot <name>`, which calls `function`.

    settings: the options of `options_of`, which the function takes as `**settings`. In a panel they go before
        the function's own.
    first: the parameters of the options that --help shows; --help-all shows the others too. () is all.
    progress: whether the command shows progress, and so has --progress.
    """
    about, *sections = SECTION.split(f"{inspect.getdoc(function)}\n")
    help, *examples = about.strip().split("\n\nExample: ")
    signature = inspect.signature(function, eval_str=True)
    parameters = [p for p in signature.parameters.values() if p.annotation is typer.Context]
    panels = dict(zip(sections[::2], sections[1::2], strict=True))
    for panel, entries in panels.items():
        parameters += [each for each in settings if each.annotation.__metadata__[0].rich_help_panel == panel]
        for own, metavar, text in ENTRY.findall(entries):
            shared = COMMON_OPTIONS.get(own, ("", ""))
            named = signature.parameters[own]
            shown = _shown(panel, own, metavar or shared[0], " ".join(text.split()) or shared[1])
            parameters.append(
                named.replace(kind=named.KEYWORD_ONLY, annotation=Annotated[named.annotation, shown])
            )

    acting = [PROGRESS] * progress + [HELP_ALL] * bool(first)
    parameters += acting
    others = {option.name for option in acting}  # typer passes their defaults all the same

    def run(**values: Any) -> None:
        _check_names(parameters, values)
        function(**{name: value for name, value in values.items() if name not in others})

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    alone = typer.Typer(add_completion=False, rich_markup_mode="rich")
    epilog = "\n\n".join(f"Example: {example}" for example in examples)
    alone.command(name, cls=Command, help=help, epilog=epilog)(run)
    command = typer.main.get_command(alone)
    assert isinstance(command, Command)
    command.first = first
    return command


def _check_names(parameters: Sequence[inspect.Parameter], values: dict[str, Any]) -> None:
    """Raises UserError if a value is to be the name of a model or of a text, and is not.

    The other ranks of a run need not have its texts.
    """
    for parameter in parameters if not rank() else ():
        shown = getattr(parameter.annotation, "__metadata__", [None])[0]
        if check := CHECKS.get(getattr(shown, "metavar", None) or ""):
            value = values[parameter.name]
            for each in value if isinstance(value, list | tuple) else filter(None, [value]):
                check(str(each))


def _shown(panel: str, name: str, metavar: str, help: str) -> Any:
    """What typer shows of an argument or an option."""
    values = [value for value in metavar.strip("[]").split("|") if value == value.lower()]
    settings: dict[str, Any] = {"help": help, "metavar": metavar or None}
    if metavar and values:
        settings["autocompletion"] = lambda: values
    if panel == "Arguments":
        return typer.Argument(**settings)
    return typer.Option(flag(name), rich_help_panel=panel, **settings)


def options_of(
    defaults: Any,
    panel: str,
    only: Sequence[str] = (),
    leave_out: Sequence[str] = (),
    **differences: dict[str, str],
) -> list[inspect.Parameter]:
    """An option for each field of a configuration class: its name, values, help and default.

    Args:
        defaults: an instance with the default of each field.
        panel: the panel of `--help` that shows the options.
        only: the fields with an option; () is all.
        leave_out: fields without an option.
        differences: field → what its option has of its own: `name`, `metavar`, `help`, or the `default` that
            it shows.
    """
    fields = [field for field in only or fields_of(type(defaults)) if field not in leave_out]
    return [_option(defaults, field, panel, **differences.get(field, {})) for field in fields]


def _option(
    defaults: Any,
    field: str,
    panel: str,
    name: str = "",
    metavar: str = "",
    help: str = "",
    default: Any = None,
) -> inspect.Parameter:
    section = type(defaults)
    default = getattr(defaults, field) if default is None else default
    annotation = fields_of(section)[field].annotation
    kind = members_of(annotation)[0]
    values: Any = str  # the class of the field reads the text: its message is the same from Python
    if kind in (bool, int, float):
        values = kind
    elif typing.get_origin(kind) is tuple:
        values, default = list[str], None
    if choices := choices_of(annotation):
        metavar = metavar or f"[{'|'.join(choices)}]"
    text = in_options(help or description_of(section, field), flag)
    return inspect.Parameter(
        name or field,
        inspect.Parameter.KEYWORD_ONLY,
        default=default if isinstance(default, int | float | None) else str(default),
        annotation=Annotated[
            values if kind is bool else values | None, _shown(panel, name or field, metavar, text)
        ],
    )


def given_options(ctx: typer.Context) -> dict[str, Any]:
    """Name → value of the parameters that the command line gives, and not their defaults."""
    # The sources are compared by name. Older typers use click's ParameterSource and newer ones a copy of it,
    # and a member of one is never equal to a member of the other.
    sources = {name: getattr(ctx.get_parameter_source(name), "name", "") for name in ctx.params}
    return {name: value for name, value in ctx.params.items() if sources[name] == "COMMANDLINE"}
