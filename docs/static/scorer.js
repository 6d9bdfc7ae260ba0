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
