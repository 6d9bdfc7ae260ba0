// What is wider than its box or the window: it is cut off, or scrolls sideways, as tables may on narrow screens.
const wide = [], right = box => box.getBoundingClientRect().right;
for (const node of document.querySelectorAll(arguments[0])) {
  if (!node.checkVisibility() || arguments[1] && node.closest(".table-wrapper, table")) continue;
  if (node.scrollWidth > node.clientWidth + 1 && node.clientWidth || right(node) > innerWidth + 1)
    wide.push(`${node.tagName} ${node.textContent.trim().slice(0, 60)}`);
}
return wide;
