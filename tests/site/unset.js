// Formulas that were not set: text between dollars, outside code.
const found = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (texts.nextNode()) {
  const text = texts.currentNode;
  if (text.data.includes("$") && !text.parentElement.closest("pre, code, script, style, svg, math"))
    found.push(text.data.trim());
}
return found;
