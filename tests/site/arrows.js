// The columns between which each arrow of this step leads, and the number of steps whose arrows are shown.
const middle = box => (box.left + box.right) / 2;
const columns = [...document.querySelectorAll("table:not([hidden]) th")].slice(1).map(th => th.getBoundingClientRect());
const near = x => columns.findIndex(box => Math.abs(middle(box) - x) < 2);
const svg = document.querySelector("tr.moves.now svg"), left = svg.getBoundingClientRect().left;
const lines = [...svg.querySelectorAll("line:not(.edge)")];
const shown = [...document.querySelectorAll("tr.moves svg")].filter(s => s.checkVisibility({visibilityProperty: true}));
return [lines.map(l => [l.x1, l.x2].map(x => near(left + x.baseVal.value))), shown.length];
