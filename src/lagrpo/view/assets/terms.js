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
const term = (name, text = name) => el("abbr", { text, data: { term: name } });

/** Facts with a dot between them. */
const dotted = (facts) => facts.map((fact, n) => (n ? [" · ", fact] : fact));

function explainTerms(root) {
  root.addEventListener("pointerover", (event) => {
    const name = event.target.dataset?.term;
    if (name) showTip([[name, TERMS[name]]], event.clientX, event.clientY);
  });
  root.addEventListener("pointerout", (event) => {
    if (event.target.dataset?.term) hideTip();
  });
}
