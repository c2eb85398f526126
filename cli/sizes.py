"""Sizes and addresses as people write them: ``512MiB``, ``2GiB``, ``1.5GB``; ``127.0.0.1:7400``, ``[::1]:0``."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import typer

from kvstrata.proto.errors import ConfigError

T = TypeVar("T")

UNITS = {
    "": 1, "B": 1,
    "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40, "PIB": 1 << 50,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str | int) -> int:
    """Bytes of ``512MiB``, ``2GB``, ``1.5GiB`` or ``1048576``. Raises :class:`ConfigError`."""
    found = _SIZE.fullmatch(str(text))
    unit = UNITS.get(found[2].upper()) if found else None
    if not found or unit is None:
        raise ConfigError(f"{text!r} is not a size: write bytes, or a number with KiB, MiB, GiB, TiB, KB, MB, GB, TB")
    number = float(found[1]) * unit
    if number != int(number) or number < 0:
        raise ConfigError(f"{text!r} is not a whole number of bytes")
    return int(number)


def format_size(nbytes: float) -> str:
    """``1536`` is ``1.5KiB``: the largest binary unit that leaves at least 1, at most two decimals."""
    for unit in ("PiB", "TiB", "GiB", "MiB", "KiB"):
        if nbytes >= UNITS[unit.upper()]:
            return f"{nbytes / UNITS[unit.upper()]:.2f}".rstrip("0").rstrip(".") + unit
    return f"{nbytes:.0f}B"


def check_address(text: str) -> str:
    """``HOST:PORT`` with a port in 0..65535; raises :class:`ConfigError`."""
    text = str(text)  # a configuration file may hold a bare number here
    host, colon, port = text.rpartition(":")
    bare_v6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not colon or not host or bare_v6 or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{text!r} is not HOST:PORT (for example 127.0.0.1:7400 or [::1]:0)")
    return text


def check_addresses(text: str | list[str]) -> str:
    """Comma-separated ``HOST:PORT``, or a configuration file's list of them, as the former."""
    parts = text if isinstance(text, list) else str(text).split(",")
    return ",".join(check_address(part) for part in parts)


def size_flag(*names: str, **more: Any) -> Any:
    """A typer option that takes a size and gives bytes."""
    return typer.Option(*names, parser=lambda text: _as_parameter(parse_size, text), metavar="SIZE", **more)


def value_flag(parse: Callable[[Any], Any], metavar: str, *names: str, **more: Any) -> Any:
    """A typer option whose text ``parse`` turns into a value; its :class:`ConfigError` is a wrong flag."""
    return typer.Option(*names, parser=lambda text: _as_parameter(parse, text), metavar=metavar, **more)


def address_flag(*names: str, **more: Any) -> Any:
    """A typer option that takes one address."""
    return typer.Option(*names, parser=lambda text: _as_parameter(check_address, text), metavar="HOST:PORT", **more)


def addresses_flag(*names: str, **more: Any) -> Any:
    """A typer option that takes comma-separated addresses."""
    return typer.Option(
        *names, parser=lambda text: _as_parameter(check_addresses, text), metavar="HOST:PORT,...", **more
    )


def _as_parameter(convert: Callable[[Any], T], value: object) -> T:
    try:
        return convert(value)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
