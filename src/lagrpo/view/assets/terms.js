// The meaning of the symbols of the page, shown where the pointer or a finger is on one of them.

const TERMS = {
  A: "advantage: the reward compared with those of the group, as the objective uses it",
  σ: "standard deviation of the group's rewards; several losses divide advantages by it",
  "π_k/α":
    "how much likelier the completion is under the policy being trained (π_k) than under the policy that sampled it (α); its log is 0 right after a weight sync",
  staleness: "optimizer updates between the policy that sampled the oldest token and π_k",
  "no signal": "all rewards of the group are equal, so that advantages are 0",
};

/** A symbol that explains itself. `text` is what stands on the page. */
function term(name, text = name) {
  // A tap explains the symbol; it must not also open the card that the symbol stands in.
  const click = (event) => event.pointerType === "touch" && event.stopPropagation();
  return el("abbr", { text, data: { term: name }, on: { click } });
}

/** Facts with a dot between them. */
const dotted = (facts) => facts.map((fact, n) => (n ? [" · ", fact] : fact));

/** Explains terms under the pointer. A finger leaves the screen at once, so its explanation stays until the next tap. */
function explainTerms(root) {
  root.addEventListener("pointerover", (event) => {
    const name = event.target.dataset?.term;
    if (name) showTip([[name, TERMS[name]]], event.clientX, event.clientY);
    else if (event.pointerType === "touch") hideTip();
  });
  root.addEventListener("pointerout", (event) => {
    if (event.target.dataset?.term && event.pointerType !== "touch") hideTip();
  });
}
