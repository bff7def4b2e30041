"""Constructor arguments: declared as fields of a class, and described for the `config.yaml` of runs from Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_args, get_type_hints

from typing_extensions import dataclass_transform

from fl_lightning.core.errors import ConfigError, check_number, check_positive

T = TypeVar("T")
PLAIN = (bool, int, float, str)
MOST_ELEMENTS = 100
"""Maximum length of a list or mapping whose elements `describe` returns. For a longer one, it returns the class."""


class ArgumentsMixin:
    """Base class that records constructor arguments, so that an object can be described in a config file."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = _keep_arguments(cls.__init__)  # type: ignore[method-assign]


def _keep_arguments(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def init_and_keep(self: ArgumentsMixin, *args: Any, **kwargs: Any) -> None:
        if "_arguments" not in vars(self):  # otherwise a subclass's constructor calls this one
            vars(self)["_arguments"] = (tuple(map(describe, args)), describe(kwargs))
        init(self, *args, **kwargs)

    return init_and_keep


def number(default: T, within: str, fix: str = "") -> T:
    """Return a field for a number that must lie in an interval, see `check_number`."""
    return field(default=default, metadata={"check": partial(check_number, within=within, fix=fix)})


def count(default: T) -> T:
    """Return a field for a whole number of 1 or more, see `check_positive`."""
    return field(default=default, metadata={"check": lambda key, value: check_positive(**{key: value})})


def choice(default: T, options: Any) -> T:
    """Return a field for one of the values of a `Literal`. The command line checks them without it."""

    def check(key: str, value: object) -> None:
        if value not in get_args(options):
            raise ConfigError(f"{key}: {value!r} is not one of {', '.join(get_args(options))}.")

    return field(default=default, metadata={"check": check})


@dataclass_transform(kw_only_default=True, field_specifiers=(field,))
class FieldsMixin(ArgumentsMixin):
    """Base class whose subclasses declare their options as annotated class attributes, as in a keyword-only dataclass.

    Each subclass becomes a `dataclass`. A field that is declared again with `field(init=False)` is not an option of the
    subclass any more. In the constructor's signature, a class's own options come before those of its base class. A
    class can write `__init__` instead. Then neither the class nor its subclasses get one from their fields.

    Attributes:
        section: The config key of the object, for error messages.

    Raises:
        ConfigError: The value of a `number`, a `count` or a `choice` is invalid.
        TypeError: A class attribute without a type has the name of an inherited option.

    Example:
        >>> class Base(FieldsMixin):
        ...     seed: int = 0
        ...     size: int = 1
        >>> class Square(Base):
        ...     width: float = 2.0
        ...     size: int = field(default=4, init=False)
        ...     sides = 4  # without a type: no option
        >>> inspect.signature(Square)
        <Signature (*, width: 'float' = 2.0, seed: 'int' = 0) -> None>
        >>> vars(Square(width=3.0))["width"], Square().size
        (3.0, 4)
    """

    section = ""
    keyword_only = True
    writes_init = False
    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __post_init__(self) -> None:
        """Check the options that are declared with `number`, `count` or `choice`."""
        for option in fields(self):
            if check := option.metadata.get("check"):
                check(f"{self.section}.{option.name}", getattr(self, option.name))

    def __init_subclass__(cls, **options: Any) -> None:
        inherited = [option for option in getattr(cls, "__dataclass_fields__", {}).values() if option.init]
        order = ["self", *inspect.get_annotations(cls), *inspect.signature(cls.__init__).parameters]
        cls.writes_init = cls.writes_init or "__init__" in vars(cls)
        dataclass(init=not cls.writes_init, kw_only=cls.keyword_only, eq=False, repr=False)(cls)
        for option in inherited:
            if option.name in vars(cls) and option in fields(cls):
                raise TypeError(f"{cls.__name__}.{option.name}: write its type, `{option.name}: {option.type} = ...`.")
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            if cls.writes_init:
                signature = _written_signature(cls.__init__)
            elif cls.keyword_only:
                signature = _sorted_signature(cls.__init__, order)
            else:
                signature = _typed_signature(cls)
            cls.__init__.__signature__ = signature  # type: ignore[attr-defined]


def _written_signature(init: Callable[..., None]) -> inspect.Signature:
    """Return the signature of a constructor with its types, which jsonargparse does not look up in a dataclass."""
    with suppress(NameError):  # a type that is imported for type checkers only
        return inspect.signature(init, eval_str=True)
    return inspect.signature(init)


def _typed_signature(kind: type) -> inspect.Signature:
    """Return the signature of a dataclass's constructor with the types of the fields, also of the base classes.

    jsonargparse does not look them up in a dataclass that also has another base class, such as `nn.Module`.
    """
    signature = inspect.signature(kind.__init__)  # type: ignore[misc]
    with suppress(NameError):  # a type that is imported for type checkers only
        types = get_type_hints(kind, include_extras=True)
        changed = [one.replace(annotation=types.get(one.name, one.annotation)) for one in signature.parameters.values()]
        return signature.replace(parameters=changed)
    return signature


def _sorted_signature(init: Callable[..., None], order: Iterable[str]) -> inspect.Signature:
    """Return the signature of a constructor with its parameters in the given order."""
    signature = inspect.signature(init)
    names = dict.fromkeys([*order, *signature.parameters])
    return signature.replace(parameters=[signature.parameters[name] for name in names if name in signature.parameters])


@dataclass_transform(field_specifiers=(field,))
class PartMixin(FieldsMixin):
    """`FieldsMixin` for the parts of a run, such as `Dirichlet(0.1)`: their options can also be given by position.

    The options of the base class come first.
    """

    keyword_only = False


def argument_types(kind: Any) -> dict[str, Any]:
    """Return the types of a class's constructor arguments, by name.

    Raises:
        NameError: A type is not defined in the module of the class that declares the argument.
    """
    declared = is_dataclass(kind) and not getattr(kind, "writes_init", False)
    return get_type_hints(kind if declared else kind.__init__)


def describe(value: Any) -> Any:
    """Convert a value to its form in a config: for example, an object to its `class_path` and `init_args`.

    Arguments with defaults are included, as in a resolved config. The arguments of an object are known if its class
    derives from `ArgumentsMixin` or is a dataclass. Of other objects, only plain attributes with the names of arguments
    are known. A tensor is described by its class path only.
    """
    if type(value).__module__ == "numpy" and value.shape == ():  # help reads this module, and does not need NumPy
        value = value.item()
    for kind in PLAIN:
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, dict | list | tuple):
        if len(value) > MOST_ELEMENTS:
            return {"class_path": _import_path(type(value))}
        if isinstance(value, dict):
            return {str(key): describe(each) for key, each in value.items()}
        return [describe(each) for each in value]
    if value is None or isinstance(value, Path):
        return value and str(value)
    if isinstance(value, partial):
        return _describe_call(value.func, value.args, value.keywords)
    if callable(value) and hasattr(value, "__qualname__"):
        return _describe_call(value)
    if "_arguments" in getattr(value, "__dict__", {}):
        return _describe_call(type(value), *vars(value)["_arguments"])
    if is_dataclass(value):
        return {field.name: describe(getattr(value, field.name)) for field in fields(value) if field.init}
    attributes, signature = getattr(value, "__dict__", {}), _signature(type(value))
    known = {name: attributes[name] for name in signature.parameters if isinstance(attributes.get(name), PLAIN)}
    return _describe_call(type(value), (), known)


def _describe_call(function: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Describe a call of a class or function as `class_path` and `init_args`, default arguments included."""
    signature = _signature(function)
    defaults = {name: each.default for name, each in signature.parameters.items() if each.default is not each.empty}
    try:
        given = signature.bind_partial(*args, **kwargs).arguments
    except TypeError:  # the call itself raises an error that names the argument
        given = dict(kwargs)
    arguments = describe(defaults) | describe(given)
    return {"class_path": _import_path(function)} | ({"init_args": arguments} if arguments else {})


def _signature(function: Any) -> inspect.Signature:
    """Return the signature of a class or function, or an empty signature if Python does not know it (some builtins)."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return inspect.Signature()


def _import_path(kind: Any) -> str:
    """Return the import path of a class or function. If this package exports it, this is `fl_lightning.<name>`."""
    from fl_lightning import HOMES

    module, name = getattr(kind, "__module__", None) or "builtins", kind.__qualname__
    return f"fl_lightning.{name}" if module.startswith("fl_lightning.") and name in HOMES else f"{module}.{name}"
