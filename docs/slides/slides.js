// The sections of a lecture as pages. Code of more than LONG lines is folded, and shorter code, too, where the page fits
// the window without it.
"use strict";

const LONG = 12;
const MAGNIFIED = 1.6; // how many times its own size a figure has at most
const HIGH = 75; // percent of the window's height that it takes at most
const SCROLLED = 0.8; // of the window's height, by a key that turns a page that goes on

function asSlides(lecture) {
  const title = document.createElement("section");
  const sections = [...lecture.children].filter((element) => element.tagName === "SECTION");
  title.append(...[...lecture.children].filter((element) => element.tagName !== "SECTION"));
  const slides = [title, ...sections];
  lecture.replaceChildren(...slides);
  slides.forEach((slide, index) => {
    slide.classList.add("slide");
    slide.tabIndex = -1;
    const page = document.createElement("p");
    page.className = "page";
    page.textContent = `${index + 1} / ${slides.length}`;
    slide.append(page);
  });
  return slides;
}

function foldLongCode(slide) {
  for (const input of slide.querySelectorAll(".cell_input")) {
    const lines = input.textContent.trim().split("\n").length;
    const details = document.createElement("details");
    const summary = document.createElement("summary");
    summary.textContent = `code, ${lines} line${lines > 1 ? "s" : ""}`;
    details.open = lines <= LONG && !slide.matches(":first-of-type");
    input.replaceWith(details);
    details.append(summary, input);
  }
}

const below = (slide) => slide.scrollHeight - slide.scrollTop - slide.clientHeight;

function fit(slide) {
  const shown = [...slide.querySelectorAll("details[open]")];
  shown.sort((a, b) => b.offsetHeight - a.offsetHeight);
  for (const details of shown) {
    if (below(slide) <= 0) break;
    details.open = false;
  }
  if (below(slide) > 0) shown.forEach((details) => { details.open = true; });
}

function magnify(slide) {
  for (const image of slide.querySelectorAll(".cell_output img")) {
    const own = Number(image.getAttribute("width")); // half as wide as the file, which is sharp when magnified
    const resize = () => {
      const ratio = image.naturalWidth / image.naturalHeight;
      image.style.width = `min(100%, ${MAGNIFIED * (own || image.naturalWidth)}px, ${HIGH * ratio}vh)`;
    };
    image.complete ? resize() : image.addEventListener("load", resize);
    image.removeAttribute("width");
    image.removeAttribute("height");
  }
}

document.addEventListener("DOMContentLoaded", () => {
  const lecture = document.querySelector("div.body > section");
  if (!document.querySelector("div.cell")) {
    document.querySelector("div.body").classList.add("index");
    return;
  }
  const slides = asSlides(lecture);
  const fitted = new Set(); // pages whose code was folded to fit, once: what a reader opens stays open
  let current = 0;

  function show(index) {
    current = Math.max(0, Math.min(slides.length - 1, index));
    slides.forEach((slide, k) => slide.classList.toggle("shown", k === current));
    slides[current].scrollTop = 0;
    slides[current].focus({preventScroll: true}); // ↓ and ↑ scroll it
    history.replaceState(null, "", `#${current + 1}`);
    if (document.readyState === "complete" && !fitted.has(current)) fit(slides[current]);
    fitted.add(current);
    markMore();
  }

  function markMore() {
    slides[current].classList.toggle("more", below(slides[current]) > 8);
  }

  function toggleCode() {
    const folded = [...slides[current].querySelectorAll("details")];
    const open = folded.some((details) => !details.open);
    folded.forEach((details) => { details.open = open; });
  }

  function turn(forward) {
    const slide = slides[current];
    const ends = forward ? below(slide) <= 8 : slide.scrollTop <= 8;
    if (ends) return show(current + (forward ? 1 : -1));
    slide.scrollTop += (forward ? SCROLLED : -SCROLLED) * slide.clientHeight;
  }

  const [forth, back] = [() => turn(true), () => turn(false)];
  const keys = {
    ArrowRight: forth, PageDown: forth, " ": forth, ArrowLeft: back, PageUp: back,
    Home: () => show(0), End: () => show(slides.length - 1),
    f: () => document.fullscreenElement ? document.exitFullscreen() : document.documentElement.requestFullscreen(),
    c: toggleCode,
  };
  document.addEventListener("keydown", (event) => {
    if (event.key in keys && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      keys[event.key]();
    }
  });
  window.addEventListener("hashchange", () => show((Number(location.hash.slice(1)) || 1) - 1));
  slides.forEach((slide) => {
    foldLongCode(slide);
    magnify(slide);
    slide.addEventListener("scroll", markMore);
    slide.addEventListener("toggle", markMore, {capture: true});
  });
  window.addEventListener("resize", markMore);
  window.addEventListener("load", () => { fitted.clear(); show(current); }); // figures have their sizes
  show((Number(location.hash.slice(1)) || 1) - 1);
});
