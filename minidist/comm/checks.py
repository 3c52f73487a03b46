"""What a mesh, a cost model and a wrapper refuse, in one sentence each.

The core calls these functions, through `hooks.comm_checks`; without them it computes the same where everything fits.

Proved by: tests/comm/test_mesh.py, tests/comm/sim/test_clock.py, tests/misuse/test_misuse.py
"""

from math import inf, prod

from minidist.core.base.errors import UsageError, nearest
from minidist.core.base.limits import MAX_VALUE, MIN_VALUE, check_size
from minidist.core.comm.mesh import Mesh
from minidist.core.comm.point_to_point import PointToPoint
from minidist.core.comm.sim.clock import LinkModel


def check_links(links: LinkModel) -> None:
    """Raise UsageError for a cost below 0, an overhead above the latency, and a rate that is none."""
    for name in ("alpha", "beta", "overhead"):
        check_size(getattr(links, name), f"link model: {name}")
    if links.link is None and links.overhead > links.alpha:
        raise UsageError(
            f"link model: overhead is {links.overhead}; it is a part of the latency alpha, so it must be from 0 to "
            f"{links.alpha}"
        )
    for name in ("flops", "memory_bandwidth"):
        if not (MIN_VALUE <= getattr(links, name) <= MAX_VALUE or getattr(links, name) == inf):
            raise UsageError(
                f"link model: {name} is {getattr(links, name)}; it must be from {MIN_VALUE:g} to {MAX_VALUE:g} per"
                " second, or infinite"
            )


def check_mesh(mesh: Mesh) -> None:
    """Raise UsageError unless each axis has a distinct name and their product is the number of ranks."""
    if len(mesh.shape) != len(mesh.axis_names) or len(set(mesh.axis_names)) != len(mesh.axis_names):
        raise UsageError(
            f"a mesh needs one distinct name for each axis, got shape {mesh.shape} and names {mesh.axis_names}"
        )
    if prod(mesh.shape) != mesh.comm.size or min(mesh.shape, default=1) < 1:
        product = " x ".join(map(str, mesh.shape)) or "1"
        raise UsageError(
            f"mesh {dict(zip(mesh.axis_names, mesh.shape, strict=True))}: {product} = {prod(mesh.shape)} ranks, "
            f"but there are {mesh.comm.size}; make the product of the axes equal to the number of ranks"
        )


def refuse_axis(mesh: Mesh, name: str) -> None:
    """Raise UsageError for the name of no axis."""
    raise UsageError(
        f"the mesh has no axis {name!r}{nearest(name, mesh.axis_names)}; it has {', '.join(mesh.axis_names)}"
    )


def check_communicator(comm: object, who: str) -> None:
    """Raise UsageError unless `comm` is a communicator. For a mesh the error names its axes; pass one of them."""
    if isinstance(comm, PointToPoint):
        return
    remedy = "pass the communicator that the program was given, or the axis of a mesh, such as mesh['dp']"
    if isinstance(comm, Mesh):
        axes = " or ".join(f"mesh[{name!r}]" for name in comm.axis_names) or "mesh.comm"
        remedy = f"a mesh has one communicator per axis: pass {axes}"
    raise UsageError(f"{who} needs a communicator, and got a value of type {type(comm).__name__}; {remedy}")
