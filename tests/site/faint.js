// Text that stands out from its background by less than the given contrast (WCAG 2: from 1 to 21), and by how much.
const channels = color => color.match(/[\d.]+/g).map(Number);
const linear = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
const over = (below, [r, g, b, a = 1]) => [r, g, b].map((v, i) => v * a + below[i] * (1 - a));
const grounds = new Map([[null, [255, 255, 255]]]);
function ground(node) {
  if (!grounds.has(node)) grounds.set(node, paint(node));
  return grounds.get(node);
}
function paint(node) {
  const style = getComputedStyle(node);
  if (style.backgroundImage != "none") return null;
  const color = channels(style.backgroundColor);
  const below = color[3] == null ? [0, 0, 0] : ground(node.parentElement);
  return below && over(below, color);
}
const faint = [];
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (texts.nextNode()) {
  const text = texts.currentNode, node = text.parentElement, style = getComputedStyle(node);
  const shown = node.checkVisibility({visibilityProperty: true}) && style.color != "rgba(0, 0, 0, 0)";
  const below = text.data.trim() && shown && !node.closest("svg") && ground(node);
  if (!below) continue;
  const [dark, light] = [luminance(over(below, channels(style.color))), luminance(below)].sort((a, b) => a - b);
  const contrast = (light + 0.05) / (dark + 0.05);
  if (contrast < arguments[0]) faint.push(`${text.data.trim()}: ${contrast.toFixed(2)}`);
}
return faint;
