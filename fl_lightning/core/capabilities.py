"""Capabilities: flags about what a class's methods do. A subclass that overrides such a method loses the flag."""

from __future__ import annotations

from inspect import getattr_static
from typing import Any, ClassVar


class Capable:
    """Base class with flags about Python methods. If a subclass overrides a method, the flags about it become False.

    The flags are boolean class attributes, called capabilities. Faster ways of running a method rely on them. A
    subclass that overrides one of the methods that a capability describes does not inherit the capability: its value
    becomes `False`, which is safe, unless the subclass sets it.

    Attributes:
        capabilities: The methods that each capability describes, by the capability's name.

    Example:
        >>> class Base(Capable):
        ...     capabilities = {"only_reads": ("visit",)}
        ...     only_reads = True
        ...     def visit(self): ...
        >>> class Writes(Base):
        ...     def visit(self): ...
        >>> class Reads(Writes):
        ...     only_reads = True
        >>> Base.only_reads, Writes.only_reads, Reads.only_reads
        (True, False, True)
    """

    capabilities: ClassVar[dict[str, tuple[str, ...]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for capability, methods in cls.capabilities.items():
            declared_by = next(kind for kind in cls.__mro__ if capability in vars(kind))
            if any(getattr_static(cls, name) is not getattr_static(declared_by, name) for name in methods):
                setattr(cls, capability, False)
