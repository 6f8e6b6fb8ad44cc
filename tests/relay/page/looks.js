// Functions that the tests of the page's appearance evaluate on the page.

// Returns the visible elements that contain text of their own, not only in child elements.
function texts() {
  return [...document.body.querySelectorAll("*")].filter((element) => {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    return (own || element.tagName === "INPUT") && element.checkVisibility({ visibilityProperty: true }) &&
      !element.closest("noscript, script, style");
  });
}

const named = (element) => `${element.tagName.toLowerCase()}#${element.id}.${element.className}: ` +
  (element.textContent || "").trim().slice(0, 40);

// Describes the elements whose text is cut off, or lies outside the screen or outside its card. An empty list is good.
function clipped() {
  const width = document.documentElement.clientWidth;
  const faults = texts().filter((element) => {
    const range = document.createRange();
    range.selectNodeContents(element);
    const inside = (box, left, right) => box.width === 0 || (box.left >= left - 1 && box.right <= right + 1);
    const card = element.closest("figure, article, button");
    const frame = card ? card.getBoundingClientRect() : { left: 0, right: width };
    return ![...range.getClientRects()].every((box) => inside(box, 0, width) && inside(box, frame.left, frame.right)) ||
      (getComputedStyle(element).overflowX !== "visible" && element.tagName !== "INPUT" && element.scrollWidth > element.clientWidth);
  }).map(named);
  const scrolls = document.documentElement.scrollWidth - width;
  if (scrolls > 0) faults.push(`the page is ${scrolls} pixels wider than the screen`);
  return faults;
}

function rgba(text) {
  const [red, green, blue, alpha = 1] = text.match(/[\d.]+/g).map(Number);
  return { red, green, blue, alpha };
}

// Returns the relative luminance, as WCAG 2 defines it.
function luminance({ red, green, blue }) {
  const [r, g, b] = [red, green, blue].map((value) => {
    const part = value / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function contrast(one, other) {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}

function background(element) {
  for (let at = element; at; at = at.parentElement) {
    const colour = rgba(getComputedStyle(at).backgroundColor);
    if (colour.alpha === 1) return colour;
    if (colour.alpha !== 0) throw new Error(`${named(at)} is partly transparent`);
  }
  return { red: 255, green: 255, blue: 255, alpha: 1 };
}

// Describes the elements whose text has a contrast below 4.5, the minimum of WCAG 2 AA. An empty list is good.
function faint() {
  return texts().flatMap((element) => {
    const ratio = contrast(rgba(getComputedStyle(element).color), background(element));
    return ratio < 4.5 ? [`${named(element)} has ${ratio.toFixed(2)}`] : [];
  });
}

// Names the controls that a user must be able to reach with the Tab key.
function controls() {
  return [...document.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex]")]
    .filter((element) => element.checkVisibility() && !element.disabled && element.tabIndex >= 0)
    .map((element) => element.id || element.textContent);
}

// Names the focused control, and says whether the page shows its focus.
function focused() {
  const element = document.activeElement;
  const style = getComputedStyle(element);
  const shows = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2 &&
    contrast(rgba(style.outlineColor), background(element.parentElement || element)) >= 3;
  return { name: element === document.body ? "" : element.id || element.textContent, shows };
}
