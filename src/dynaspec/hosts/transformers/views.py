"""A model seen through a subclass that overrides one of its methods, without changing the model.

Transformers' generation calls methods of the model it generates with. A view is an instance of a subclass of the
model's class that shares the model's modules, parameters, hooks and configuration, so that an overridden method is seen
by Transformers for as long as the view is used, and by nobody else.
"""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def _view_class(mixin: type, model_class: type) -> type:
    """Once for each class of models. It keeps the class's name, which Transformers looks at."""
    names = {name: getattr(model_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(model_class.__name__, (mixin, model_class), names)


def view_of(model: Any, mixin: type, **attributes: Any) -> Any:
    """``model`` with the methods of ``mixin`` before its own.

    Args:
        attributes: of the view alone. Others are those that the model has at this moment.
    """
    model_class: type = type(model)
    view: Any = object.__new__(_view_class(mixin, model_class))
    view.__dict__.update(model.__dict__)
    view.__dict__.update(attributes)
    return view
