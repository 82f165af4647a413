"""Under which names the one model is served."""

from __future__ import annotations

from dataclasses import dataclass

from app.errors import ModelNotFound

ANY = "*"


@dataclass(frozen=True, slots=True)
class ServedNames:
    """`own` is the model's own name; `given` are --served-model-name, which stand instead of it."""

    own: str
    given: tuple[str, ...] = ()

    @property
    def listed(self) -> tuple[str, ...]:
        """What `/v1/models` shows; never empty."""
        return tuple(dict.fromkeys(name for name in self.given if name != ANY)) or (self.own,)

    @property
    def first(self) -> str:
        """The name to print."""
        return self.listed[0]

    def check(self, name: str) -> None:
        """Raises ModelNotFound for a name that is not served."""
        if name not in self.listed and ANY not in self.given:
            raise ModelNotFound(name, self.listed)
