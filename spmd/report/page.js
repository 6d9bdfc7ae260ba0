"use strict";
(() => {
  const get = (selector) => [...document.querySelectorAll(selector)];
  const step = document.getElementById("step");
  const play = document.getElementById("play");
  const sliders = get("[data-role]"); // and menus
  const option = (slider) => JSON.parse(slider.dataset.options)[slider.value];
  const isMoves = (row) => row !== null && row.classList.contains("moves");
  const rows = () => [...document.querySelector("table:not([hidden]) tbody").rows].filter((row) => !isMoves(row));

  // Show the steps up to number k.
  function show(k) {
    const all = rows();
    const now = Math.max(0, Math.min(k, all.length - 1));
    step.max = all.length - 1;
    step.value = now;
    step.nextElementSibling.textContent = `step ${now + 1} of ${all.length}`;
    all.forEach((row, i) => {
      [row, row.previousElementSibling].filter((each) => each === row || isMoves(each)).forEach((each) => {
        each.classList.toggle("later", i > now);
        each.classList.toggle("now", i === now);
      });
    });
    all[now].scrollIntoView({ block: "nearest" });
  }

  // Draw an arrow for each [from, to, color]: from a column of the row above to one of the row below.
  let heads = 0;
  function drawArrows(cell) {
    const columns = cell.closest("td").colSpan;
    const middle = (column) => `${(100 * (column + 0.5)) / columns}%`;
    const arrows = JSON.parse(cell.dataset.moves).map(([from, to, color]) => {
      const line = `x1="${middle(from)}" y1="6%" x2="${middle(to)}" y2="94%" pathLength="1"`;
      const head = `<marker id="head${++heads}" orient="auto" markerUnits="userSpaceOnUse" markerWidth="12"
        markerHeight="12" refX="11" refY="6"><path d="M1,1 L11,6 L1,11 z" fill="${color}"/></marker>`;
      return `${head}<line class="edge" ${line}/><line ${line} stroke="${color}" marker-end="url(#head${heads})"/>`;
    });
    cell.innerHTML = `<svg role="img" aria-label="arrows where data moves">${arrows.join("")}</svg>`;
  }

  // Show the table that the sliders choose.
  function choose() {
    sliders.forEach((slider) => {
      if (slider.tagName === "INPUT") slider.parentElement.nextElementSibling.textContent = option(slider);
    });
    const key = JSON.stringify(sliders.filter((s) => s.dataset.role === "table").map(option));
    get("table").forEach((table) => { table.hidden = JSON.stringify(JSON.parse(table.dataset.key)) !== key; });
    get("table:not([hidden]) [data-moves]:empty").forEach(drawArrows);
    cost();
  }

  // T = steps * alpha + bytes * beta, for each row that has these numbers.
  function cost() {
    const constants = Object.fromEntries(sliders.map((s) => [s.dataset.role, Number(option(s))]));
    const cells = get("table:not([hidden]) [data-steps]");
    const times = cells.map((c) => c.dataset.steps * constants.alpha + c.dataset.bytes * constants.beta);
    cells.forEach((cell, i) => {
      cell.textContent = times[i].toExponential(3) + " s";
      cell.nextElementSibling.style.width = `${(12 * times[i]) / Math.max(...times)}em`;
    });
  }

  const moves = { first: () => 0, back: (k) => k - 1, forth: (k) => k + 1, last: () => Infinity };
  const keys = { Home: "first", ArrowLeft: "back", ArrowRight: "forth", End: "last" };
  Object.entries(moves).forEach(([id, move]) => {
    document.getElementById(id).addEventListener("click", () => show(move(Number(step.value))));
  });
  // Go on by a step each second, until the last one.
  let timer = null;
  function stop() {
    clearInterval(timer);
    timer = null;
    play.textContent = "play";
  }
  play.addEventListener("click", () => {
    if (timer) return stop();
    if (step.value === step.max) show(0);
    play.textContent = "pause";
    timer = setInterval(() => {
      show(Number(step.value) + 1);
      if (step.value === step.max) stop();
    }, 1000);
  });
  step.addEventListener("input", () => show(Number(step.value)));
  sliders.forEach((slider) => slider.addEventListener("input", () => { choose(); show(Number(step.value)); }));
  document.addEventListener("keydown", (event) => {
    if (!["INPUT", "SELECT"].includes(event.target.tagName) && keys[event.key]) {
      show(moves[keys[event.key]](Number(step.value)));
      event.preventDefault();
    }
  });
  choose();
  show("whole" in document.body.dataset ? Infinity : 0);
})();
