"""A tenant's policy as people write it: limits or ``none``, floors, in sizes; and as the master takes it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvstrata.cli.sizes import UNITS, parse_size
from kvstrata.proto import control_pb2 as control
from kvstrata.proto.errors import ConfigError

NONE = "none"


@dataclass(frozen=True, slots=True)
class Limit:
    """Bytes, or None: no limit."""

    nbytes: int | None

    @classmethod
    def parse(cls, text: object) -> Limit:
        """``200GiB``, a number of bytes, or ``none``. Raises :class:`ConfigError`."""
        if text is None or str(text).strip().lower() == NONE:
            return cls(None)
        try:
            return cls(parse_size(str(text)))
        except ConfigError as error:
            raise ConfigError(f"{error}, or {NONE} for no limit") from error

    def __str__(self) -> str:
        return NONE if self.nbytes is None else exact_size(self.nbytes)


@dataclass(frozen=True, slots=True)
class Policy:
    """What one tenant may use (limits) and keeps (floors), over the whole cluster, in each tier."""

    dram: Limit = Limit(None)
    ssd: Limit = Limit(None)
    dram_floor: int = 0
    ssd_floor: int = 0

    @classmethod
    def of(cls, message: control.TenantPolicy) -> Policy:
        return cls(
            Limit(message.dram_limit if message.HasField("dram_limit") else None),
            Limit(message.ssd_limit if message.HasField("ssd_limit") else None),
            message.dram_floor,
            message.ssd_floor,
        )

    def message(self, salt: str) -> control.TenantPolicy:
        return control.TenantPolicy(
            salt=salt,
            dram_limit=self.dram.nbytes,
            ssd_limit=self.ssd.nbytes,
            dram_floor=self.dram_floor,
            ssd_floor=self.ssd_floor,
        )

    def changed(
        self,
        dram: Limit | None = None,
        ssd: Limit | None = None,
        dram_floor: int | None = None,
        ssd_floor: int | None = None,
    ) -> Policy:
        """With the parts that are given; None leaves a part as it is."""
        return replace(
            self,
            dram=self.dram if dram is None else dram,
            ssd=self.ssd if ssd is None else ssd,
            dram_floor=self.dram_floor if dram_floor is None else dram_floor,
            ssd_floor=self.ssd_floor if ssd_floor is None else ssd_floor,
        )

    @property
    def floors(self) -> int:
        return self.dram_floor + self.ssd_floor

    def text(self) -> str:
        """``dram 200GiB (floor 20GiB), ssd none``."""
        parts = (("dram", self.dram, self.dram_floor), ("ssd", self.ssd, self.ssd_floor))
        return ", ".join(
            f"{tier} {limit}" + (f" (floor {exact_size(floor)})" if floor else "") for tier, limit, floor in parts
        )


#: A salt that may store nothing.
NOTHING = Policy(Limit(0), Limit(0))


def exact_size(nbytes: int) -> str:
    """``200GiB``, ``1536MiB``, or bytes: the largest unit that says it exactly, for it may be read again."""
    for unit in ("PiB", "TiB", "GiB", "MiB", "KiB"):
        if nbytes and nbytes % UNITS[unit.upper()] == 0:
            return f"{nbytes // UNITS[unit.upper()]}{unit}"
    return str(nbytes)
