"""A node's processes, kept running by one supervisor."""

from treadle.supervise.background import BackgroundNode
from treadle.supervise.prepare import PreparedNode, prepare_node, with_model
from treadle.supervise.supervisor import Supervisor

__all__ = ["BackgroundNode", "PreparedNode", "Supervisor", "prepare_node", "with_model"]
