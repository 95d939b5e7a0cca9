"use strict";
// Sorting, filtering and the code browser of a report. Text from the record is only ever assigned to textContent.
(() => {
  const byId = (id) => document.getElementById(id);
  for (const part of document.querySelectorAll(".scripted")) part.hidden = false;
  for (const part of document.querySelectorAll(".unscripted")) part.hidden = true;

  // Tables: a button in each heading; numbers sort by data-v, other cells by text, empty ones last.
  const value = (row, column) => {
    const cell = row.cells[column];
    if (cell.dataset.v === "None" || cell.textContent === "–") return null;
    return cell.dataset.v === undefined ? cell.textContent : Number(cell.dataset.v);
  };
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true }));
  const sortBy = (table, column, sign) => {
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => [value(row, column), row]);
    rows.sort(([a], [b]) => (a === null || b === null ? (a === null) - (b === null) : sign * compare(a, b)));
    body.append(...rows.map(([, row]) => row));
  };
  for (const table of document.querySelectorAll("table.sorts")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      if ("fixed" in head.dataset) return;
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        sortBy(table, column, down ? -1 : 1);
      });
    });
  }

  // Filter: every word must occur in the row.
  const filter = byId("filter"), lines = [...byId("all").tBodies[0].rows];
  const texts = lines.map((row) => [...row.cells].slice(0, -1).map((cell) => cell.textContent).join(" ").toLowerCase());
  const narrow = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    lines.forEach((row, i) => { shown += !(row.hidden = !words.every((word) => texts[i].includes(word))); });
    byId("shown").textContent = `${shown} of ${lines.length}`;
  };
  filter.addEventListener("input", narrow);
  narrow();
  // All programs end the same way; the page holds that ending once.
  for (const program of document.querySelectorAll("pre.program")) {
    program.closest("details").addEventListener("toggle", () => program.append(byId("ending").textContent), { once: true });
  }
  // A link to a filtered or collapsed row or case reveals it.
  const reveal = () => {
    const target = location.hash.length > 1 ? byId(location.hash.slice(1)) : null;
    if (!target) return;
    if (target.hidden) { filter.value = ""; narrow(); }
    if (target.tagName === "DETAILS") target.open = true;
    target.scrollIntoView({ block: "nearest" });
    target.focus({ preventScroll: true });
  };
  addEventListener("hashchange", reveal);

  // Code: two panes over the same stages.
  if (byId("browser")) {
    const stages = [...document.querySelectorAll("#stages pre")].map((pre) => pre.textContent.replace(/\n$/, "").split("\n"));
    const known = JSON.parse(byId("lines").textContent);
    byId("stages").hidden = true;
    const panes = ["left", "right"].map((side) => ({ choice: byId(`${side}-stage`), box: byId(`${side}-text`), counts: byId(`${side}-counts`), at: -1 }));
    let lit = null, hits = [], hit = -1;

    const light = () => {
      const counts = [];
      for (const pane of panes) {
        let first = null, count = 0;
        for (const line of pane.box.children) {
          const on = lit !== null && line.dataset.ref === lit;
          line.classList.toggle("lit", on);
          line.setAttribute("aria-selected", on);
          count += on;
          if (on && first === null) first = line;
        }
        counts.push(count);
        if (first && !pane.active) first.scrollIntoView({ block: "center", inline: "nearest" });
      }
      byId("lit").textContent = lit === null ? "" : `${lit}: ${counts[0]} on the left, ${counts[1]} on the right.`;
    };
    const find = (step) => {
      const wanted = byId("find").value.toLowerCase();
      if (step === 0) {
        hits = [], hit = -1;
        for (const pane of panes) {
          for (const line of pane.box.children) {
            const on = wanted !== "" && line.textContent.toLowerCase().includes(wanted);
            line.classList.toggle("hit", on);
            if (on) hits.push(line);
          }
        }
      }
      if (hits.length) {
        hit = (hit + (step || 1) + hits.length) % hits.length;
        hits[hit].scrollIntoView({ block: "center", inline: "nearest" });
      }
      byId("found").textContent = wanted === "" ? "" : hits.length ? `${hit + 1} of ${hits.length}` : "not found";
    };
    const go = (pane, to) => {
      const all = pane.box.children;
      if (!all.length) return;
      if (all[pane.at]) all[pane.at].classList.remove("at");
      pane.at = Math.max(0, Math.min(all.length - 1, to));
      all[pane.at].classList.add("at");
      pane.box.setAttribute("aria-activedescendant", all[pane.at].id);
      all[pane.at].scrollIntoView({ block: "nearest", inline: "nearest" });
    };
    const choose = (pane) => {
      const line = pane.box.children[pane.at];
      const ref = line ? line.dataset.ref : undefined;
      lit = ref === undefined || ref === lit ? null : ref;
      for (const other of panes) other.active = other === pane;
      light();
    };
    const show = (pane) => {
      const number = Number(pane.choice.value), { runs, counts } = known.stages[number], map = new Map();
      for (const [first, count, place] of runs) for (let line = first; line < first + count; line++) map.set(line, known.places[place]);
      pane.box.replaceChildren(...stages[number].map((text, i) => {
        const line = document.createElement("span");
        line.className = "l";
        line.role = "option";
        line.id = `${pane.box.id}-${i + 1}`;
        line.dataset.n = i + 1;
        const ref = map.get(i + 1);
        if (ref !== undefined) { line.dataset.ref = ref; line.title = ref; }
        line.textContent = text + "\n";
        return line;
      }));
      pane.counts.textContent = Object.entries(counts).map(([name, count]) => `${name} ${count}`).join(" · ");
      pane.at = -1;
      pane.box.removeAttribute("aria-activedescendant");
      pane.box.scrollTop = 0;
      light();
      find(0);
    };
    for (const pane of panes) {
      pane.choice.addEventListener("change", () => show(pane));
      pane.box.addEventListener("click", (event) => {
        const line = event.target.closest(".l");
        if (line) { go(pane, [...pane.box.children].indexOf(line)); choose(pane); }
      });
      pane.box.addEventListener("keydown", (event) => {
        const page = Math.max(1, Math.floor(pane.box.clientHeight / 20));
        const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page };
        if (event.key in steps) { event.preventDefault(); go(pane, pane.at + steps[event.key]); }
        if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(pane); }
      });
    }
    panes[1].choice.value = String(Math.min(1, stages.length - 1));
    panes.forEach(show);
    byId("find").addEventListener("input", () => find(0));
    byId("find").addEventListener("keydown", (event) => {
      if (event.key === "Enter") { event.preventDefault(); find(event.shiftKey ? -1 : 1); }
    });
    byId("next").addEventListener("click", () => find(1));
    byId("previous").addEventListener("click", () => find(-1));
  }
  reveal();
})();
