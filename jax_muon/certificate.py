"""What `verify` found out about a layout: numbers and bounds, and a table of them."""

import dataclasses
from collections.abc import Mapping

from jax.sharding import PartitionSpec

from jax_muon.describe import aligned, bytes_text, lies
from jax_muon.mesh.traffic import Collective


@dataclasses.dataclass(frozen=True)
class VerifiedArray:
    """One array of updates or state: a mesh compared with one device.

    Attributes:
      path: of the parameter, or of the array within the state.
      shape: of the whole array.
      difference: length of the difference over that of one device's array, at the step
        where it is largest; infinite where an element is finite in one of them only.
      bound: the most that `difference` may be.
      finite: whether all elements are, in both.
      same_bits: whether devices that hold the same piece hold the same bits.
      spec: where the parameter lies; None for state.
    """

    path: str
    shape: tuple[int, ...]
    difference: float
    bound: float
    finite: bool
    same_bits: bool
    spec: PartitionSpec | None = None

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong with it, in words."""
        what = "the update of" if self.spec is not None else "state"
        where = f"{what} {self.path!r} of shape {self.shape}"
        wrong = []
        if not self.difference <= self.bound:
            wrong.append(
                f"{where} differs from that of one device by {self.difference:.2g} of "
                f"its length; expected at most {self.bound:.2g}"
            )
        if not self.finite:
            wrong.append(f"{where} has elements that are not finite")
        if not self.same_bits:
            wrong.append(f"{where} differs between devices that hold the same piece")
        return tuple(wrong)


@dataclasses.dataclass(frozen=True)
class Certificate:
    """What `verify` found; printed, it is a table.

    Attributes:
      updates: one entry for each parameter.
      state: one for each array of the optimizer's state, after the last step.
      steps: how many updates were made.
      sizes: devices along each mesh axis.
      collectives: of the compiled update, as one device sees them; those in a loop or
        in a branch are counted once.
    """

    updates: tuple[VerifiedArray, ...]
    state: tuple[VerifiedArray, ...]
    steps: int
    sizes: Mapping[str, int]
    collectives: tuple[Collective, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong, in words; nothing where the layout is right."""
        return tuple(text for x in (*self.updates, *self.state) for text in x.problems)

    @property
    def ok(self) -> bool:
        """Whether everything is within its bound, finite, and equal where it has to."""
        return not self.problems

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends in one update."""
        return sum(found.sent_bytes for found in self.collectives)

    def raise_if_wrong(self) -> "Certificate":
        """The certificate itself, if it is `ok`.

        Raises:
          ValueError: with path, number and bound of every array that is wrong.
        """
        if not self.ok:
            mesh = ", ".join(f"{name} {size}" for name, size in self.sizes.items())
            raise ValueError(
                f"the layout on the mesh ({mesh}) is not that of one device: "
                + "; ".join(self.problems)
            )
        return self

    def __str__(self) -> str:
        """A table of all parameters, and a line on state, devices and bytes each."""
        rows = [("parameter", "shape", "lies", "difference", "bound")]
        for x in self.updates:
            shape = " x ".join(map(str, x.shape)) or "scalar"
            numbers = (f"{x.difference:.1e}", f"{x.bound:.0e}")
            rows.append((x.path, shape, lies(x.spec, None), *numbers))
        lines = aligned(rows)
        if self.state:
            worst = max(self.state, key=lambda x: x.difference / x.bound)
            lines.append(
                f"{len(self.state)} arrays of state: the largest difference is "
                f"{worst.difference:.1e} of at most {worst.bound:.0e}, in {worst.path}"
            )
        devices = " x ".join(f"{name} {size}" for name, size in self.sizes.items())
        lines.append(
            f"{self.steps} updates on the mesh {devices}, compared with one device"
        )
        by_kind = [
            f"{len(found)} {kind} of {bytes_text(round(sum(found)))}"
            for kind in dict.fromkeys(c.kind for c in self.collectives)
            for found in [[c.sent_bytes for c in self.collectives if c.kind == kind]]
        ]
        lines.append(f"a device sends in an update: {', '.join(by_kind) or 'nothing'}")
        lines += [f"WRONG: {text}" for text in self.problems] or ["right"]
        return "\n".join(lines)
