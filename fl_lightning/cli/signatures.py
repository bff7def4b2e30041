"""Read names, types, defaults and descriptions of class arguments from this package's sources, without importing torch.

`parameters` gives what `jsonargparse` would find in an imported class. A test compares the two for every class that a
config can name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGE = "fl_lightning"
NO_DEFAULT = object()

TYPES = {
    "int": "INT",
    "float": "NUMBER",
    "str": "TEXT",
    "dict": "MAPPING",
    "list": "LIST",
    "tuple": "LIST",
    "Sequence": "LIST",
}
"""The placeholder of each type in help texts. Any other type is a class, which users give by name."""


@dataclass(frozen=True)
class Parameter:
    """A constructor parameter of a class, read from the source code.

    Args:
        name: The parameter's name. A parameter within a group such as `head` has a dotted name: `head.hidden`.
        types: The alternatives of the type, without None: names of types, or `Literal`s as tuples of their values.
        default: The default value, or the name of a default class; `NO_DEFAULT` for a required parameter.
        help: The description in the docstring.
    """

    name: str
    types: tuple[str | tuple[Any, ...], ...]
    default: Any
    help: str

    @property
    def choices(self) -> list[str]:
        """The values that a `Literal` or bool type of the parameter allows; an empty list for other types."""
        return [word for kind in self.types for word in words(kind)]

    @property
    def metavar(self) -> str:
        """The placeholder for the parameter's value in help texts, such as `INT`, `fresh|kept` or `NAME` (a class)."""
        kinds = [words(one) or [TYPES.get(str(one), "NAME")] for one in self.types]
        found = list(dict.fromkeys(word for kind in kinds for word in kind)) or ["VALUE"]
        if found == ["INT", "NUMBER"]:
            return "NUMBER"
        if "NAME" in found or len(found) > 4:
            return "NAME"
        return "VALUE" if len(found) > 1 and found[0].isupper() else "|".join(found)

    @property
    def option(self) -> dict[str, Any]:
        """The parameter as a dict for help texts: placeholder, description, choices and default."""
        found: dict[str, Any] = {"metavar": self.metavar, "help": self.help}
        if self.choices:
            found["choices"] = self.choices
        if self.default is NO_DEFAULT:
            found["needed"] = True
        elif self.default not in (None, "", []):
            found["default"] = self.default
        return found


def words(kind: str | tuple[Any, ...]) -> list[str]:
    """Return the values of a `Literal` or bool type as words; an empty list for any other type."""
    if isinstance(kind, tuple):
        return list(dict.fromkeys(map(str, kind)))
    return ["true", "false"] if kind == "bool" else []


@dataclass(frozen=True, eq=False)
class Source:
    """The syntax tree of a module of this package.

    Args:
        name: The module's full name.
        tree: The syntax tree.
    """

    name: str
    tree: ast.Module

    @cached_property
    def names(self) -> dict[str, ast.stmt]:
        """For each name at the top level of the module, the statement that defines or imports the name."""
        found: dict[str, ast.stmt] = {}
        statements = list(self.tree.body)
        for one in statements:
            if isinstance(one, ast.If):  # TYPE_CHECKING
                statements += one.body
            elif isinstance(one, ast.ClassDef | ast.FunctionDef):
                found[one.name] = one
            elif isinstance(one, ast.ImportFrom):
                found |= {alias.asname or alias.name: one for alias in one.names}
            elif isinstance(one, ast.Assign | ast.AnnAssign):
                targets = one.targets if isinstance(one, ast.Assign) else [one.target]
                found |= {target.id: one for target in targets if isinstance(target, ast.Name)}
        return found

    def find(self, name: str) -> tuple[Source, ast.stmt] | None:
        """Return the module and the statement that define a name, following imports; None if outside this package."""
        statement = self.names.get(name)
        if not isinstance(statement, ast.ImportFrom):
            return (self, statement) if statement else None
        if not statement.module or not statement.module.startswith(f"{PACKAGE}."):
            return None
        original = next(one.name for one in statement.names if (one.asname or one.name) == name)
        return source(statement.module).find(original)


@cache
def source(module: str) -> Source:
    """Return the syntax tree of a module of this package, without importing the module."""
    path = path_of(module)
    path = path / "__init__.py" if path.is_dir() else path.with_name(f"{path.name}.py")
    return Source(module, ast.parse(path.read_text(encoding="utf-8")))


def path_of(module: str) -> Path:
    """Return the file path of a module of this package, without the suffix. The module is not imported."""
    _, package, *rest = module.split(".")
    spec = find_spec(f"{PACKAGE}.{package}")
    assert spec
    if not spec.submodule_search_locations:
        return Path(str(spec.origin)).with_suffix("")
    return Path(spec.submodule_search_locations[0], *rest)


@dataclass(frozen=True, eq=False)
class Class:
    """A class of this package, read from the source code.

    Args:
        module: The module that defines the class.
        node: The class definition.
    """

    module: Source
    node: ast.ClassDef

    @property
    def name(self) -> str:
        """The name of the class."""
        return self.node.name

    @property
    def docstring(self) -> str:
        """The docstring of the class."""
        return ast.get_docstring(self.node) or ""

    @property
    def summary(self) -> str:
        """The first line of the class's docstring.

        If the class works with one algorithm only, such as a loss term of this algorithm, a sentence names it.
        """
        line = self.docstring.partition("\n")[0]
        return f"{line} Only in {self.only_in}." if self.only_in else line

    @property
    def only_in(self) -> str | None:
        """The only algorithm in which the class works (its class attribute `only_in`); None if it works in all."""
        statements = (one for each in self.ancestors for one in each.node.body if isinstance(one, ast.Assign))
        values = (one.value for one in statements if ast.unparse(one.targets[0]) == "only_in")
        return next((ast.literal_eval(value) for value in values), None)

    @cached_property
    def bases(self) -> list[Class]:
        """The direct base classes that this package defines."""
        return [found for base in self.node.bases if (found := class_in(self.module, base))]

    @cached_property
    def ancestors(self) -> list[Class]:
        """The class itself and all its direct and indirect base classes in this package, nearest first."""
        return [self, *(one for base in self.bases for one in base.ancestors)]

    @cached_property
    def is_dataclass(self) -> bool:
        """Whether the class is a dataclass."""
        return any("dataclass" in ast.unparse(one) for one in self.node.decorator_list)

    @cached_property
    def declares_options(self) -> bool:
        """Whether the class declares its arguments as fields, see `FieldsMixin`."""
        return any(one.name == "FieldsMixin" for one in self.ancestors)

    @cached_property
    def takes_positions(self) -> bool:
        """Whether the fields can also be given by position, those of the base class first, see `PartMixin`."""
        return any(one.name == "PartMixin" for one in self.ancestors)

    @cached_property
    def help(self) -> dict[str, str]:
        """Descriptions of the constructor parameters by name, from the docstrings of the class and its base classes."""
        found: dict[str, str] = {}
        for one in reversed(self.ancestors):
            found |= arguments_in(one.docstring)
        return found


def class_in(module: Source, node: ast.AST | None) -> Class | None:
    """Return the class that a name in a module's source refers to; None if this package does not define the class."""
    found = module.find(node.id) if isinstance(node, ast.Name) else None
    return Class(found[0], found[1]) if found and isinstance(found[1], ast.ClassDef) else None


def find_class(path: str) -> Class:
    """Describe a class of this package, given its import path. The class is read from source code, not imported."""
    module, _, name = path.rpartition(".")
    found = class_in(source(module), ast.Name(name))
    assert found, path
    return found


@cache
def classes(package: str, base: str) -> dict[str, Class]:
    """Return the subclasses of a base class that a module or package exports, by name, in alphabetical order.

    Args:
        package: The module or package. Without an `__all__` that is a plain list, all of its public classes count.
        base: The import path of the base class, which is not returned.
    """
    top = find_class(base).node
    found = (one for one in _exported(package) if top in [each.node for each in one.ancestors[1:]])
    return dict(sorted(((one.name, one) for one in found), key=lambda item: item[0].lower()))


def _exported(package: str) -> Iterator[Class]:
    exports = source(package).names.get("__all__")
    if isinstance(exports, ast.Assign) and isinstance(exports.value, ast.List):
        yield from filter(None, (class_in(source(package), ast.Name(name)) for name in ast.literal_eval(exports.value)))
        return
    root = path_of(package)
    for file in sorted(root.rglob("*.py")):
        module = source(".".join([package, *file.relative_to(root).with_suffix("").parts]))
        nodes = (node for node in module.tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_")
        yield from (Class(module, node) for node in nodes)


def parameters(cls: Class) -> list[Parameter]:
    """Return the constructor parameters of a class. Fields of a dataclass argument get dotted names: `head.hidden`."""
    found = []
    for name, annotation, default, owner in signature(cls):
        group = class_in(owner.module, annotation)
        if group and group.is_dataclass:
            given = {one.arg: one.value for one in default.keywords} if isinstance(default, ast.Call) else {}
            for one in parameters(group):
                value = constant(owner.module, given[one.name]) if one.name in given else one.default
                found.append(Parameter(f"{name}.{one.name}", one.types, value, one.help))
        else:
            value = NO_DEFAULT if default is None else constant(owner.module, default)
            found.append(Parameter(name, tuple(types(owner.module, annotation)), value, cls.help.get(name, "")))
    return found


Argument = tuple[str, ast.expr | None, ast.expr | None, Class]
"""A parameter's name, annotation, default, and the class whose source has them."""


def signature(cls: Class) -> list[Argument]:
    """Return the arguments of a class's constructor as tuples `(name, annotation, default, class)`.

    The last one is the class that defines the argument: the class itself or a base class.
    """
    if cls.is_dataclass:
        fields = {argument[0]: argument for base in cls.bases for argument in signature(base)}
        return list((fields | {argument[0]: argument for argument in _fields(cls)}).values())
    init = next((one for one in cls.node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
    if init is None and cls.declares_options:
        inherited = {argument[0]: argument for base in cls.bases for argument in signature(base)}
        declared = {argument[0]: argument for argument in _fields(cls)}
        first = inherited if cls.takes_positions else declared
        return [one for one in (first | inherited | declared).values() if not _is_fixed(one[2])]
    if init is None or (init.args.kwarg and init.args.vararg):  # passes all arguments to the base class
        return next((found for base in cls.bases if (found := signature(base))), [])
    arguments = [*init.args.args[1:], *init.args.kwonlyargs]
    without_default = [None] * (len(init.args.args) - 1 - len(init.args.defaults))
    defaults = [*without_default, *init.args.defaults, *init.args.kw_defaults]
    return [(one.arg, one.annotation, default, cls) for one, default in zip(arguments, defaults, strict=True)]


def _fields(cls: Class) -> Iterator[Argument]:
    annotated = (one for one in cls.node.body if isinstance(one, ast.AnnAssign))
    for one in annotated:
        if isinstance(one.target, ast.Name) and "ClassVar" not in ast.unparse(one.annotation):
            yield one.target.id, one.annotation, one.value, cls


def _is_fixed(default: ast.expr | None) -> bool:
    """Return whether a field's default is `field(init=False)`, so that the field is no argument."""
    return isinstance(default, ast.Call) and any(ast.unparse(one) == "init=False" for one in default.keywords)


def types(module: Source, node: ast.AST | None) -> Iterator[str | tuple[Any, ...]]:
    """Yield the alternatives of a type annotation except None: `int` and `str` for `int | str | None`."""
    if isinstance(node, ast.BinOp):
        yield from types(module, node.left)
        yield from types(module, node.right)
    elif isinstance(node, ast.Subscript):
        name = ast.unparse(node.value)
        values = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        yield ast.literal_eval(ast.Tuple(values)) if name == "Literal" else name
    elif isinstance(node, ast.Name):
        found = module.find(node.id)
        if found and isinstance(found[1], ast.Assign):
            yield from types(found[0], found[1].value)
        else:
            yield node.id
    elif not (node is None or (isinstance(node, ast.Constant) and node.value is None)):
        yield ast.unparse(node)


def constant(module: Source, node: ast.expr) -> Any:
    """Return the value of an argument's default expression in the source code; a class is returned by name."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "field":  # of a dataclass, with a default_factory
        factory = node.keywords[0].value
        return constant(module, factory.body) if isinstance(factory, ast.Lambda) else []
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("number", "count", "choice"):
        return constant(module, node.args[0])
    try:
        value = ast.literal_eval(node)
    except ValueError:
        found = module.find(node.id) if isinstance(node, ast.Name) else None
        if found and isinstance(found[1], ast.Assign | ast.AnnAssign) and found[1].value:
            return constant(found[0], found[1].value)
        return ast.unparse(node).rpartition(".")[2]
    return list(value) if isinstance(value, tuple) else value


def arguments_in(docstring: str) -> dict[str, str]:
    """Return the argument descriptions in a docstring's `Args` section, by argument name."""
    section = re.search(r"^Args:\n((?: .*\n?|\n)+)", docstring, re.MULTILINE)
    entry = r"^    (\w+): ((?:.*)(?:\n {5,}.*|\n(?=\n* {5,}))*)"
    entries = re.findall(entry, section[1] if section else "", re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
