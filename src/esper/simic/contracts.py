"""What simic relies on of a host, without importing kasmina: satisfied structurally."""

from esper.leyline.protocols import SeedSlotProtocol, SeedStateProtocol, SlottedHostProtocol

__all__ = ["SeedSlotProtocol", "SeedStateProtocol", "SlottedHostProtocol"]
