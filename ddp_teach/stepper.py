"""A picture to go through event by event: a slider draws a curtain over what has yet to come.

No widget and no server is needed: a few lines of HTML, which also work in an exported page. At
first, and on paper, all is to be seen.
"""

import json
from html import escape
from typing import TYPE_CHECKING

from ddp_teach.timeline_scale import TOP, ByOrder
from ddp_teach.timeline_text import lines_of

if TYPE_CHECKING:
    from ddp_teach.timeline import Timeline

PAGE = """<div>
<input type="range" min="0" max="{last}" value="{last}" style="width: 20em; vertical-align: middle"
 aria-label="Step through the events" data-steps="{steps}" oninput="{script}">
<output>{words}</output><br>
<div style="position: relative; display: inline-block; line-height: 0">{svg}
<div data-curtain style="position: absolute; inset: 100% 0 0 0; background: white"></div></div>
</div>"""
SCRIPT = """
const [top, words] = JSON.parse(this.dataset.steps)[this.value];
this.parentElement.querySelector('[data-curtain]').style.top = top + '%';
this.parentElement.querySelector('output').textContent = words;
"""


class Stepper:
    """Shows as HTML in a notebook and as text elsewhere."""

    def __init__(self, timeline: "Timeline"):
        self.picture, scale = timeline.plot(), ByOrder(timeline)
        height = self.picture.figure.get_figheight() * 72  # points
        self.steps = [(TOP, "nothing has happened yet")]
        self.steps += [(scale.low(i), line.strip()) for i, line in lines_of(timeline)]
        shown = [(round(100 * (low - 0.5) / height, 2), words) for low, words in self.steps]
        shown[-1] = 100, shown[-1][1]
        self.html = PAGE.format(
            svg=self.picture.svg,
            last=len(shown) - 1,
            steps=escape(json.dumps(shown)),
            script=escape(SCRIPT.replace("\n", " ").strip()),
            words="Move the slider to go through the events one by one.",
        )

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return repr(self.picture)
