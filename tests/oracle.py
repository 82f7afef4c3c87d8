"""Slow, obvious NumPy: section 2 of the design, and logistic regression to run it on."""

import numpy as np


def clip(gradient, norm):
    length = np.sqrt(np.sum(gradient**2))
    return gradient if length <= norm else gradient * (norm / length)


RULES = {
    "rmsprop": lambda v, m2, rho: rho * v + (1 - rho) * m2,
    "adagrad": lambda v, m2, rho: v + m2,
    "yogi": lambda v, m2, rho: v - (1 - rho) * np.sign(v - m2) * m2,
}


def dp2(gradients, w, batches, *, rule, s1, s2, lr, lr_sgd, clip_norm, clip_sgd, eps, batch_size,
        rho=0.9, sigma=0.0, noise=None, bias_correction=False, noise_first=False):  # fmt: skip
    """Weights before each step and after the last; `noise[t]` is standard normal."""
    G, v, path = np.zeros_like(w), np.zeros_like(w), [w]
    for t, batch in enumerate(batches):
        p = t % (s1 + s2)
        if p == 0:
            G = np.zeros_like(w)
        if p == s1:
            m2 = (G / s1) ** 2
            if bias_correction:
                m2 = np.maximum(m2 - (sigma * clip_sgd / batch_size) ** 2 / s1, 0)
            v, G = RULES[rule](v, m2, rho), np.zeros_like(w)
        scale = np.ones_like(w) if p < s1 else 1 / (np.sqrt(v) + eps)
        C, rate = (clip_sgd, lr_sgd) if p < s1 else (clip_norm, lr)
        before, after = (np.ones_like(w), scale) if noise_first else (scale, np.ones_like(w))
        total = sum([clip(before * g, C) for g in gradients(w, batch)], np.zeros_like(w))
        if sigma:
            total = total + sigma * C * noise[t]
        g = after * total / batch_size
        if p < s1:
            G = G + g
        w = w - rate * g
        path.append(w)
    return np.array(path)


def extra_query(gradients, w, batches, *, rule, s, lr, lr_sgd, clip_norm, clip_sgd, eps, batch_size,
                rho=0.9, sigma=0.0, noise=None):  # fmt: skip
    """The paper's Algorithm 2, as its code has it; `noise[t]` are the standard normals of both releases."""
    G, v, path = np.zeros_like(w), np.zeros_like(w), [w]
    for t, batch in enumerate(batches):
        first, second = noise[t] if sigma else (0.0, 0.0)
        rows = list(gradients(w, batch))
        clipped = sum([clip(row, clip_sgd) for row in rows], np.zeros_like(w))
        g = (clipped + sigma * clip_sgd * first) / batch_size
        G = G + g
        if t % s == 0:
            v, G = RULES[rule](v, (G / (s if t else 1)) ** 2, rho), np.zeros_like(w)
            w = w - lr_sgd * g
        else:
            scaled = [clip(row / (np.sqrt(v) + eps), clip_norm) for row in rows]
            w = w - lr * (sum(scaled, np.zeros_like(w)) + sigma * clip_norm * second) / batch_size
        path.append(w)
    return np.array(path)


def pilot(gradients, w, batches, *, clip_norm, batch_size, sigma, noise):
    """The scale that three rounds find at weights that stay."""
    scale, (size, rest) = np.ones_like(w), divmod(len(batches), 3)
    assert rest == 0
    for first in range(0, len(batches), size):
        steps = range(first, first + size)
        sums = [sum(clip((scale * g) ** 2, clip_norm) for g in gradients(w, batches[t])) for t in steps]
        noisy = [total + sigma * clip_norm * noise[t] for t, total in zip(steps, sums)]
        energy, nu = np.mean(noisy, axis=0) / batch_size, sigma * clip_norm / batch_size / np.sqrt(size)
        above = np.maximum(energy - 2 * nu, 0)
        factor = (1 + above / nu) ** -0.25
        scale = scale * factor * np.sqrt(np.sqrt(np.sum(above) / np.sum(above * factor**2)))
    return scale


def noise_floor(gradients, w, batches, *, delay, power, lr, clip_norm, batch_size, sigma, noise, shrinkage,
                scale=1.0, stretch=1.0):  # fmt: skip
    """DP² whose scale and weights are relative to the noise; `lr(t)` is a rate, the rest the pilot's."""
    nu2, u, squares, path = (sigma * clip_norm / batch_size) ** 2, np.zeros_like(w), [], [w]
    z, variance = np.zeros_like(w), 0.0
    for t, batch in enumerate(batches):
        d = (nu2 / (u + nu2)) ** (power / 2)
        total = sum([clip(scale * d * g, clip_norm) for g in gradients(w, batch)], np.zeros_like(w))
        g = (total + sigma * clip_norm * noise[t]) / batch_size
        squares.append((g**2 - nu2) / d**2)
        if t % delay == 0:
            u = np.maximum(np.mean(squares, axis=0), 0)
        z, variance = z - lr(t) * g, variance + lr(t) ** 2 * nu2
        w = path[0] + stretch * z**3 / (z**2 + shrinkage * variance)
        path.append(w)
    return np.array(path)


def vanilla(gradients, w, batches, *, rule, lr, clip_norm, batch_size, eps=0.0, rho=0.9, beta_1=0.0,
            debias=False, sigma=0.0, noise=None):  # fmt: skip
    """DP-SGD (rule None), and noise-then-scale with v refreshed before use."""
    v, m, path = np.zeros_like(w), np.zeros_like(w), [w]
    for t, batch in enumerate(batches):
        total = sum([clip(g, clip_norm) for g in gradients(w, batch)], np.zeros_like(w))
        if sigma:
            total = total + sigma * clip_norm * noise[t]
        g = total / batch_size
        step = g
        if beta_1:
            m = beta_1 * m + (1 - beta_1) * g
            step = m / (1 - beta_1 ** (t + 1))
        if rule is not None:
            v = RULES[rule](v, g**2, rho)
            step = step / (np.sqrt(v / (1 - rho ** (t + 1)) if debias else v) + eps)
        w = w - lr * step
        path.append(w)
    return np.array(path)


def adadps(gradients, public, w, batches, *, rule, lr, clip_norm, eps, batch_size, rho=0.9, sigma=0.0,
           noise=None):  # fmt: skip
    """Scale by the second moment of public gradients, then privatize; `public(w, t)` is a mean gradient."""
    v, path = np.zeros_like(w), [w]
    for t, batch in enumerate(batches):
        v = RULES[rule](v, public(w, t) ** 2, rho)
        total = sum([clip(g / (np.sqrt(v) + eps), clip_norm) for g in gradients(w, batch)], np.zeros_like(w))
        if sigma:
            total = total + sigma * clip_norm * noise[t]
        w = w - lr * total / batch_size
        path.append(w)
    return np.array(path)


def pda_dpmd(gradients, public, w, batches, *, lr, clip_norm, batch_size, alpha, sigma=0.0, noise=None):
    """A mix of the private gradient, weighted `alpha(t)`, and the public one."""
    path = [w]
    for t, batch in enumerate(batches):
        total = sum([clip(g, clip_norm) for g in gradients(w, batch)], np.zeros_like(w))
        if sigma:
            total = total + sigma * clip_norm * noise[t]
        w = w - lr * (alpha(t) * total / batch_size + (1 - alpha(t)) * public(w, t))
        path.append(w)
    return np.array(path)


def top_projection(rows, k):
    """The projection on the k top eigenvectors of the rows' second moment, as a d x d matrix."""
    _, vectors = np.linalg.eigh(rows.T @ rows / len(rows))
    return vectors[:, -k:] @ vectors[:, -k:].T


def public_subspace(gradients, public, w, batches, *, k, lr, clip_norm, eps, batch_size, sigma=0.0,
                    noise=None):  # fmt: skip
    """AdaGrad with noisy squares, projected; `noise[t]` are the standard normals of squares and gradients."""
    v, path = np.zeros_like(w), [w]
    for t, batch in enumerate(batches):
        first, second = noise[t] if sigma else (0.0, 0.0)
        clipped = [clip(g, clip_norm) for g in gradients(w, batch)]
        squares = (sum(g**2 for g in clipped) + sigma * clip_norm**2 * first) / batch_size
        mean = (sum(clipped) + sigma * clip_norm * second) / batch_size
        v = v + top_projection(np.array(public(w, t)), k) @ squares
        w = w - lr * mean / (np.sqrt(np.maximum(v, 0)) + eps)
        path.append(w)
    return np.array(path)


def logistic_gradients(x, y):
    """Per-example gradients of logistic regression; w = [weights, bias]."""

    def gradients(w, rows):
        features = np.concatenate([x[rows], np.ones((len(rows), 1))], axis=1)
        residual = 1 / (1 + np.exp(-features @ w)) - y[rows]
        return residual[:, None] * features

    return gradients
