"use strict";
(() => {
  const tip = document.body.appendChild(document.createElement("div"));
  tip.className = "tip";
  const place = (event) => {
    tip.style.display = "block";
    const box = tip.getBoundingClientRect();
    const left = event.clientX + 16 + box.width > innerWidth ? event.clientX - box.width - 12 : event.clientX + 16;
    tip.style.left = Math.max(4, left) + "px";
    tip.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 4)) + "px";
  };
  const line = (colour, text) => {
    const row = document.createElement("div");
    if (colour) row.appendChild(document.createElement("i")).style.background = colour;
    row.append(text);
    return row;
  };
  const nearest = (xs, x) => {
    let best = 0;
    for (let i = 1; i < xs.length; i++) if (Math.abs(xs[i] - x) < Math.abs(xs[best] - x)) best = i;
    return best;
  };
  for (const chart of document.querySelectorAll(".chart.lines, .chart.heat")) {
    const svg = chart.querySelector("svg");
    const data = JSON.parse(chart.querySelector("script").textContent);
    const [left, top, width, height] = data.box;
    const rule = document.createElementNS("http://www.w3.org/2000/svg", "line");
    rule.setAttribute("class", "rule");
    rule.setAttribute("y1", top);
    rule.setAttribute("y2", top + height);
    svg.appendChild(rule);
    const hide = () => { tip.style.display = "none"; rule.style.visibility = "hidden"; };
    svg.addEventListener("mouseleave", hide);
    svg.addEventListener("mousemove", (event) => {
      const frame = svg.getBoundingClientRect();
      const scale = svg.viewBox.baseVal.width / frame.width;
      const u = ((event.clientX - frame.left) * scale - left) / width;
      const v = ((event.clientY - frame.top) * scale - top) / height;
      if (u < 0 || u > 1 || v < 0 || v > 1) return hide();
      const rows = [];
      if (data.series) {
        const x = data.x[0] + u * (data.x[1] - data.x[0]);
        rows.push(line(null, data.name + " " + Math.round(x)));
        for (const series of data.series) {
          rows.push(line(series.colour, series.name + "  " + series.text[nearest(series.x, x)]));
        }
      } else {
        const column = Math.min(data.spans.length - 1, Math.floor(u * data.spans.length));
        const expert = Math.min(data.experts - 1, Math.floor(v * data.experts));
        const [first, last] = data.spans[column];
        rows.push(line(null, "expert " + expert + ", " + (first === last ? "step " + first : "steps " + first + "–" + last)));
        const load = data.loads[column][expert];
        if (load !== null) rows.push(line(null, load === 0 ? "no tokens" : load + " × the mean"));
      }
      tip.replaceChildren(...rows);
      rule.setAttribute("x1", left + u * width);
      rule.setAttribute("x2", left + u * width);
      rule.style.visibility = "visible";
      place(event);
    });
  }
})();
