"""Where nodes of a chaos run live: each in a network namespace of its own, behind a link that can be cut."""

from __future__ import annotations

from bench._network import Network, Unavailable, _run

__all__ = ["Hosts", "Unavailable"]


class Hosts(Network):
    """``count`` hosts on one switch. Links are named by the number of their host."""

    def __init__(self, count: int) -> None:
        super().__init__([1000.0] * count, 0.0)

    def network(self, host: int) -> str | None:
        return self.names[host]

    def listen(self, host: int) -> list[str]:
        """The options that a peer on this host listens with."""
        return ["--listen", f"/ip4/{self.addresses[host]}/tcp/0"]

    def cut(self, host: int) -> None:
        """Pull the plug."""
        _run("ip", "-n", f"{self._own}s", "link", "set", f"port{host}", "down")

    def mute(self, host: int, *, hears: bool) -> None:
        """Drop one direction: a host that hears is not heard, one that does not hear is."""
        _run("ip", "netns", "exec", self.names[host], "iptables", "-I", "OUTPUT" if hears else "INPUT", "1",
             "-o" if hears else "-i", "eth0", "-j", "DROP")  # fmt: skip

    def slow(self, host: int, mbit: float) -> None:
        """Make the link narrow, in both directions."""
        shape = ("root", "tbf", "rate", f"{mbit:g}mbit", "burst", "32kb", "latency", "100ms")
        _run("tc", "-n", self.names[host], "qdisc", "change", "dev", "eth0", *shape)
        _run("tc", "-n", f"{self._own}s", "qdisc", "change", "dev", f"port{host}", *shape)

    def mend(self, host: int) -> None:
        """The link as it was made."""
        _run("ip", "-n", f"{self._own}s", "link", "set", f"port{host}", "up")
        for chain in ("INPUT", "OUTPUT"):
            _run("ip", "netns", "exec", self.names[host], "iptables", "-F", chain)
        self.slow(host, self._mbit[host])
