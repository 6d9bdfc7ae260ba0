// Labels of a drawing that are partly outside of it.
const all = document.documentElement.getBoundingClientRect();
return [...document.querySelectorAll("text")].filter(text => {
  const box = text.getBoundingClientRect();
  return box.left < all.left - 1 || box.top < all.top - 1 || box.right > all.right + 1 || box.bottom > all.bottom + 1;
}).map(text => text.textContent);
