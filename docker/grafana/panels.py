"""Queries, and panels of figures and of lines; `$op` and `$instance` are what is chosen at the top of the page."""

from collections.abc import Sequence
from typing import TypeVar

from grafana_foundation_sdk.builders import common, prometheus, stat, timeseries
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    BigValueTextMode,
    GraphDrawStyle,
    LegendDisplayMode,
    LegendPlacement,
    LineStyle,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    DynamicConfigValue,
)

LETTERS = "ABCDEFGHIJKLMNOP"
SOURCE = DataSourceRef(type_val="prometheus", uid="prometheus")
HERE = 'instance=~"$instance"'
#: The histogram whose buckets lead to traces.
EXEMPLARS = "normserve_request_duration_seconds_bucket"
OPS = f'{HERE},op=~"$op"'
PEAK = f"max by (device) (normserve_device_copy_bandwidth_bytes_per_second{{{HERE}}})"

#: An expression and its legend.
Query = tuple[str, str]
_Panel = TypeVar("_Panel", stat.Panel, timeseries.Panel)


def rate(metric: str, by: str, labels: str = OPS) -> str:
    """How fast a counter grows, by labels; altogether if there are none."""
    return f"sum{f' by ({by}) ' if by else ''}(rate({metric}{{{labels}}}[$__rate_interval]))"


def mean(metric: str, by: str, labels: str = OPS) -> str:
    """The mean of what a histogram counted."""
    return f"{rate(f'{metric}_sum', by, labels)} / {rate(f'{metric}_count', by, labels)}"


def quantile(share: float, metric: str, by: str, labels: str = OPS) -> str:
    """A quantile of what a histogram counted."""
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', f'le, {by}', labels)})"


def kernel_bandwidth(by: str) -> str:
    """Bytes over device time: the mean that weighs each launch by how long it took."""
    return f"{rate('normserve_kernel_bytes_total', by)} / {rate('normserve_kernel_seconds_total', by)}"


def numbers(title: str, doc: str, unit: str, queries: Sequence[Query], *, names_only: bool = False) -> stat.Panel:
    """What holds now, in large figures."""
    text = BigValueTextMode.NAME if names_only else BigValueTextMode.AUTO
    panel = stat.Panel().text_mode(text).color_mode(BigValueColorMode.VALUE).graph_mode(BigValueGraphMode.NONE)
    options = common.ReduceDataOptions().calcs(["lastNotNull"])
    return _filled(panel.reduce_options(options).height(4), title, doc, unit, queries, instant=True)


def lines(title: str, doc: str, unit: str, queries: Sequence[Query], *, stacked: bool = False) -> timeseries.Panel:
    """Lines over time, or areas on top of one another; lines named as a peak are dashed."""
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    tooltip = common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING)
    stacking = common.StackingConfig().mode(StackingMode.NORMAL if stacked else StackingMode.NONE)
    panel = timeseries.Panel().legend(legend.show_legend(True)).tooltip(tooltip).height(8)
    panel = panel.draw_style(GraphDrawStyle.LINE).line_width(1).show_points(VisibilityMode.NEVER)
    panel = panel.stacking(stacking.group("A")).fill_opacity(30 if stacked else 0)
    dashes = LineStyle(fill="dash", dash=[10, 10])
    peak = [
        DynamicConfigValue(id_val="custom.lineStyle", value=dashes),
        DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": "text"}),
    ]
    return _filled(panel, title, doc, unit, queries, instant=False).override_by_regexp("/peak of/", peak)


def _filled(panel: _Panel, title: str, doc: str, unit: str, queries: Sequence[Query], *, instant: bool) -> _Panel:
    panel.title(title).description(doc).unit(unit).min(0).datasource(SOURCE)
    if len(queries) > len(LETTERS):
        raise ValueError(f"{title} has {len(queries)} queries, at most {len(LETTERS)} have a letter")
    for letter, (expr, legend) in zip(LETTERS, queries, strict=False):
        query = prometheus.Dataquery().ref_id(letter).datasource(SOURCE).expr(expr).legend_format(legend)
        panel.with_target(query.instant() if instant else query.range().exemplar(EXEMPLARS in expr))
    return panel
