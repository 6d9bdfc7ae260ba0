// How search ranks what it finds: Sphinx's scores, and pages that answer questions before those that teach in order.
const FIRST = ["docs/mistakes", "docs/errors", "docs/coming-from"];
var Scorer = {
  score: ([docname, title, anchor, descr, score]) =>
    score + (FIRST.includes(docname) ? 4 : docname.startsWith("docs/guide") ? 2 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};

// The sections that have most words of a query, not only those that have all: a pasted message has the reader's own
// names in it. The score is the mean of the words' scores. The index calls a section "page#anchor".
const searchSections = Search.performTermsSearch;
Search.performTermsSearch = (words, excluded) => {
  const found = new Map();
  for (const word of words)
    for (const hit of searchSections(new Set([word]), excluded)) {
      const [before, score] = found.get(hit[0]) ?? [0, 0];
      found.set(hit[0], [before + 1, score + hit[4] / words.size, hit]);
    }
  const most = Math.max(...[...found.values()].map(([count]) => count));
  return [...found.values()]
    .filter(([count]) => count === most)
    .map(([, score, [name, title, , ...rest]]) => {
      const [page, anchor] = name.split("#");
      rest[1] = score;
      return [page, title, anchor ? "#" + anchor : "", ...rest];
    });
};

// Names of the reference have dots, which mean something else to a query selector.
const textOf = Search.htmlToText;
Search.htmlToText = (html, anchor) => textOf(html, anchor && "#" + CSS.escape(anchor.slice(1)));
