"""Objects of another library with a class that is made at run time: a mixin of drot in front of their own.

It is for classes for which the other library has no registry. The new class has the name of the stock class,
by which transformers, accelerate and vLLM recognise modules.
"""

import functools
from typing import Any


class Mixin:
    """Base of the mixins whose objects can be pickled: pickle finds no class by name that was made so."""

    #: the keyword arguments of `mix`
    given: dict[str, Any]

    def __reduce__(self) -> Any:
        mixin, stock_class = type(self).__bases__
        return _new, (mixin, stock_class, self.given), self.__getstate__()


def mix(instance: Any, mixin: Any, **given: Any) -> None:
    """Puts `mixin` in front of the class of an object. given: class attributes, which the mixin declares."""
    stock_class: Any = type(instance)
    instance.__class__ = _mixed(mixin, stock_class, **given)


def unmix(instance: Any) -> None:
    """Undoes `mix`."""
    instance.__class__ = type(instance).__bases__[1]


@functools.cache
def _mixed(mixin: Any, stock_class: Any, **given: Any) -> Any:
    content = {"__module__": stock_class.__module__, "given": given, **given}
    return type(stock_class.__name__, (mixin, stock_class), content)


def _new(mixin: Any, stock_class: Any, given: dict[str, Any]) -> Any:
    cls = _mixed(mixin, stock_class, **given)
    return cls.__new__(cls)
