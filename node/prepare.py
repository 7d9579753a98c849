"""Before a process takes part: compile the kernels, and prove that this machine computes the bits of the run."""

from __future__ import annotations

from atoll.protocol.statefolder import state_home


def prepare() -> None:
    """Compile the kernels, or load them from the cache, and check; set the process up for chunks.

    Takes seconds of CPU when the cache is cold; call it in a thread.

    Raises :class:`~atoll.protocol.errors.ResourceError` when this machine computes other bits.
    """
    from atoll.protocol import kernels
    from atoll.protocol.malloc import keep_freed_memory
    from atoll.protocol.selftest import self_test

    keep_freed_memory()

    # One cache for all runs and nodes of this user: what is compiled depends on the machine only.
    kernels.configure(cache_dir=state_home() / "kernels")
    kernels.warm_up()
    self_test()
