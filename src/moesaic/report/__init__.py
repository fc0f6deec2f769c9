"""HTML pages about runs, made from their metrics alone. No torch."""

from moesaic.report.page import write_report
from moesaic.report.read import ReportError, RunRecord, read_run

__all__ = ["ReportError", "RunRecord", "read_run", "write_report"]
