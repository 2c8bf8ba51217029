"""The real step of any rank of any world, run under fake tensors on one CPU and written down."""

from amalthea.plan.trace.run import trace_step as trace_step
from amalthea.plan.trace.workload import Workload as Workload
