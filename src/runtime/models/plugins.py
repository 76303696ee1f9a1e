"""Models of others, by `register_model` or the entry-point group `motet.models`. Loads no torch before one is used."""

from __future__ import annotations

import inspect
import threading
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from motet.errors import ModelError

if TYPE_CHECKING:  # torch is behind it
    from motet.runtime.models.base import CausalLM

ENTRY_POINT_GROUP = "motet.models"

# What an application registers holds for every engine of the process, as an installed plug-in does.
_registered: dict[str, type[CausalLM]] = {}
_gate = threading.Lock()


def register_model(architecture: str, cls: type[CausalLM]) -> None:
    """Has `cls` run the checkpoints whose `config.json` names `architecture`, in every engine started from now on.

    A package does the same for whoever installs it with an entry point of the group `motet.models`, named as
    the architecture. `motet.models` holds the protocol that `cls` must satisfy, and what to build it of. Any
    thread may call this; the same pair again changes nothing. Raises `ModelError` if the architecture has a
    class already (one of motet, another's, an installed plug-in's), or if `cls` is no `CausalLM`.
    """
    from motet.runtime.models.registry import MODELS

    if not isinstance(architecture, str) or not architecture:
        raise ModelError(
            f"an architecture is named as in config.json, 'LlamaForCausalLM' say, not {architecture!r}"
        )
    _check_class(cls, f"the class registered for {architecture}")
    claims = [_described(entry) for entry in _claims(architecture)]
    with _gate:
        taken = _registered.get(architecture)
        if taken is cls:
            return
        if architecture in MODELS:
            claims.append("motet itself")
        if taken is not None:
            claims.append(f"{taken.__module__}.{taken.__qualname__}")
        if claims:
            raise ModelError(
                f"the architecture {architecture} has a class already, of {claims[0]}; register yours under "
                "another name, and give the checkpoint's config.json that name"
            )
        _registered[architecture] = cls


def find_plugin(architecture: str, own: type[CausalLM] | None) -> type[CausalLM] | None:
    """The class for the architecture: `own`, the one registered, or that of the one plug-in that claims it.

    Raises `ModelError`, naming the plug-in, if it is broken or not the only one; others are not loaded.
    """
    claims = _claims(architecture)
    with _gate:
        present = own or _registered.get(architecture)
    if len(claims) > (0 if present is not None else 1):
        others = f"; motet runs it with {present.__module__}.{present.__qualname__}" if present else ""
        raise ModelError(
            f"the architecture {architecture} is claimed by {' and by '.join(map(_described, claims))}{others}. "
            "Uninstall all but one of them"
        )
    if present is not None or not claims:
        return present
    try:
        plugin = claims[0].load()
    except Exception as error:  # whatever the plug-in's own code raises
        raise ModelError(
            f"{_described(claims[0])} cannot be loaded ({type(error).__name__}: {error}); mend or uninstall it"
        ) from error
    _check_class(plugin, _described(claims[0]))
    found: type[CausalLM] = plugin
    return found


def plugin_names() -> set[str]:
    """The architectures of all plug-ins, registered or installed."""
    with _gate:
        return {*_registered, *entry_points(group=ENTRY_POINT_GROUP).names}


def check_model(model: CausalLM) -> None:
    """Raises `ModelError` if the model lacks one of the attributes that `CausalLM` asks for."""
    protocol = _protocol()
    attributes = [
        *protocol.__annotations__,
        *(n for n, m in vars(protocol).items() if isinstance(m, property)),
    ]
    if missing := [name for name in attributes if not hasattr(model, name)]:
        raise ModelError(f"{type(model).__qualname__} lacks {', '.join(missing)}: see motet.models.CausalLM")


def _check_class(cls: Any, what: str) -> None:
    """Raises `ModelError` if it lacks a method of `CausalLM`, or has one that cannot be called alike."""
    if not isinstance(cls, type):
        raise ModelError(
            f"{what} is no class but {cls!r}; one that satisfies motet.models.CausalLM is needed"
        )
    protocol = _protocol()
    for name, member in vars(protocol).items():
        if name.startswith("_") or isinstance(member, property):
            continue
        expected = inspect.signature(getattr(protocol, name))
        method = getattr(cls, name, None)
        if not callable(method):
            raise ModelError(f"{what} lacks the method {name}{expected}: see motet.models.CausalLM")
        try:
            inspect.signature(method).bind(*expected.parameters)
        except (TypeError, ValueError) as error:
            raise ModelError(
                f"{what} has a method {name} that cannot be called as {name}{expected} ({error}): "
                "see motet.models.CausalLM"
            ) from error


def _protocol() -> Any:
    from motet.runtime.models.base import CausalLM

    return CausalLM


def _claims(architecture: str) -> list[EntryPoint]:
    return sorted(entry_points(group=ENTRY_POINT_GROUP, name=architecture), key=_described)


def _described(entry: EntryPoint) -> str:
    package = f" of the package {entry.dist.name} {entry.dist.version}" if entry.dist is not None else ""
    return f"the plug-in {entry.value!r}{package}"
