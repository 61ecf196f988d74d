"""Options that set the fields of the configuration, made from the declarations of the fields."""

import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import typer

from drot.cli.messages import flag, in_options
from drot.cli.options import option
from drot.config.settings import description_of, fields_of
from drot.core.validation import choices_of, members_of

Command = TypeVar("Command", bound=Callable[..., None])


def options_of(
    defaults: Any,
    panel: str,
    only: Sequence[str] = (),
    leave_out: Sequence[str] = (),
    **differences: dict[str, Any],
) -> list[inspect.Parameter]:
    """An option for each field of a configuration class: its name, values, help and default.

    Args:
        defaults: an instance with the default of each field.
        panel: the panel of `--help` that shows the options.
        only: the fields with an option; () is all.
        leave_out: fields without an option.
        differences: field → what differs from its declaration: `name`, `help`, or an argument of typer.Option.
    """
    fields = [field for field in only or fields_of(type(defaults)) if field not in leave_out]
    return [_option(defaults, field, panel, differences.get(field, {})) for field in fields]


def _option(defaults: Any, field: str, panel: str, differences: dict[str, Any]) -> inspect.Parameter:
    section, default = type(defaults), getattr(defaults, field)
    texts = {"name": field, "help": description_of(section, field)} | differences
    name, help = texts.pop("name"), texts.pop("help")
    annotation = fields_of(section)[field].annotation
    kind = members_of(annotation)[0]
    values: Any = str  # the class of the field reads the text: its message is the same from Python
    if kind in (bool, int, float):
        values = kind
    elif typing.get_origin(kind) is tuple:
        values, default = list[str], None
    shown = option(panel, in_options(help, flag), flag(name), choices=choices_of(annotation), **texts)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default if isinstance(default, int | float | None) else str(default),
        annotation=Annotated[values if kind is bool else values | None, shown],
    )


def with_settings(**before: list[inspect.Parameter]) -> Callable[[Command], Command]:
    """A decorator that gives a command options for settings, which it takes as `**settings`.

    before: parameter of the command → the options that `--help` shows before it.
    """

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command)
        parameters: list[inspect.Parameter] = []
        for parameter in signature.parameters.values():
            parameters += before.get(parameter.name, [])
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                parameters.append(parameter)
        declared: Any = command
        declared.__signature__ = signature.replace(parameters=parameters)
        return command

    return decorate


def given_options(ctx: typer.Context) -> dict[str, Any]:
    """Name → value of the parameters that the command line gives, and not their defaults."""
    # The sources are compared by name. Older typers use click's ParameterSource and newer ones a copy of it,
    # and a member of one is never equal to a member of the other.
    sources = {name: getattr(ctx.get_parameter_source(name), "name", "") for name in ctx.params}
    return {name: value for name, value in ctx.params.items() if sources[name] == "COMMANDLINE"}
