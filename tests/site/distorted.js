// Pictures that are wider, or higher, than they should be for their height.
const stretched = image => image.clientWidth * image.naturalHeight / (image.clientHeight * image.naturalWidth);
return [...document.images].filter(image => image.checkVisibility() && image.naturalWidth)
  .filter(image => Math.abs(stretched(image) - 1) > 0.03)
  .map(image => `${image.src.split("/").pop()}: ${image.clientWidth} by ${image.clientHeight}`);
