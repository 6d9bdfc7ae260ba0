// Pictures made of pixels that have fewer than two, each way, for one of the page, except Sphinx's icons.
return [...document.images]
  .filter(image => !/[.]svg|_static/.test(image.src) && image.checkVisibility() && image.naturalWidth)
  .filter(image => image.naturalWidth < 2 * image.clientWidth - 2 || image.naturalHeight < 2 * image.clientHeight - 2)
  .map(image => `${image.src.split("/").pop()}: ${image.naturalWidth} for ${image.clientWidth}`);
