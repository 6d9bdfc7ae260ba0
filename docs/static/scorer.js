// How search ranks what it finds. Pages that answer questions come before those that teach in order, and these before
// pages about the inside of the packages.
const BONUS = {
  "docs/mistakes": 3, "docs/errors": 3, "docs/coming-from": 3, "docs/cheat-sheet": 3, "docs/speed": 2,
  "docs/guide/training": 3, "docs/guide/functions": 3,
  "docs/architecture": -3, "docs/design": -3, "docs/implementations": -3, "docs/topics": -3,
  README: -1, CHANGELOG: -6, "docs/changes/0.1.0": -6,
};
// Other words for what a newcomer asks for, as the index has them: without endings.
const SYNONYMS = {
  save: ["checkpoint", "resum"], load: ["checkpoint", "resum"], seed: ["random", "stream"], slow: ["fast"],
  deadlock: ["hang"], stuck: ["hang"], oom: ["memori"],
};
var Scorer = {
  score: ([docname, title, anchor, descr, score]) =>
    score + (BONUS[docname] ?? (docname.startsWith("docs/guide") ? 2 : 0)),
  objNameMatch: 11,
  objPartialMatch: -2,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 10,
  partialTitle: 6,
  term: 5,
  partialTerm: 2,
};

// Sphinx finds what has all words of a query. A question and a pasted message have words that no page has, such as the
// reader's own names. So the score of a section is the mean of its words' scores, each weighted by how rare the word is;
// sections with less than a third of the best score are left out. The index calls a section "page#anchor".
const searchWords = Search.performTermsSearch;
Search.performTermsSearch = (words, excluded) => {
  const scores = new Map();
  let weights = 0;
  for (const word of new Set([...words].flatMap((word) => [word, ...(SYNONYMS[word] ?? [])]))) {
    const hits = searchWords(new Set([word]), excluded);
    const weight = hits.length && Math.log(1 + Search._index.docnames.length / hits.length);
    weights += weight;
    for (const hit of hits) scores.set(hit[0], [hit, (scores.get(hit[0])?.[1] ?? 0) + weight * hit[4]]);
  }
  const best = Math.max(...[...scores.values()].map(([, score]) => score));
  return [...scores.values()]
    .filter(([, score]) => score >= best / 3)
    .map(([[name, title, , descr, , ...rest], score]) => {
      const [page, anchor] = name.split("#");
      return [page, title, anchor ? "#" + anchor : "", descr, score / weights, ...rest];
    });
};

// Names of the reference have dots, which mean something else to a query selector.
const textOf = Search.htmlToText;
Search.htmlToText = (html, anchor) => textOf(html, anchor && "#" + CSS.escape(anchor.slice(1)));

// Sphinx counts results, which are sections here, and calls them pages.
const FOUND = "Search finished, found one page matching the search query.";
Documentation.TRANSLATIONS[FOUND] = ["One result.", "${resultCount} results."];
