"""atoll: a peer-to-peer node for training neural networks on machines that owe each other nothing."""

__version__ = "0.1.0"
