"""The mathematics of group-relative policy optimization: pure functions of tensors, only torch.

    recipes      a table; each row names the functions of an objective
    losses       surrogates and regularizers, per token
    masks        tokens that keep their gradient        weights      factors of a token's gradient
    filters      tokens that stay in any surrogate      corrections  weights pi_k/alpha
    advantages   rewards of a group -> an advantage per completion
    ratios       pi/alpha per token, sequence, or length-normalized
    kl           KL estimators, exact divergences
    reductions   lengths -> weights of completions
    estimators   pass@k and intervals
    bounds       bounds on the improvement of a step

Token quantities are flat [T] without padding; an index says which completion each token belongs
to. A suffix gives the shape: _T tokens, _C completions, _G completions of one group.
"""
