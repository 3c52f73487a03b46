"""The algorithms as their papers print them, on one number at a time in plain Python, to hold the fast code against.

Each is a generator function of (p, settings): send it gradients, it yields parameters. No code is shared with minidist.
Where PyTorch's meaning differs from the paper, the comment says which one this is.
"""

from math import sqrt


def sgd(p, lr, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False):
    """Sutskever et al. 2013, section 2, with the buffer in units of gradients, as PyTorch documents it."""
    buffer = None
    g = yield p
    while True:
        g = g + weight_decay * p
        if momentum:
            buffer = g if buffer is None else momentum * buffer + (1 - dampening) * g
            g = g + momentum * buffer if nesterov else buffer
        p = p - lr * g
        g = yield p


def adagrad(p, lr, lr_decay=0.0, weight_decay=0.0, initial_accumulator_value=0.0, eps=1e-10):
    """Duchi et al. 2011, diagonal; eps next to the root, the rate divided by 1 + (t - 1) lr_decay."""
    total, t = initial_accumulator_value, 0
    g = yield p
    while True:
        t += 1
        g = g + weight_decay * p
        total = total + g * g
        p = p - lr / (1 + (t - 1) * lr_decay) * g / (sqrt(total) + eps)
        g = yield p


def rmsprop(p, lr, alpha=0.99, eps=1e-8, weight_decay=0.0, momentum=0.0, centered=False):
    """Graves 2013, equations 38 to 41; eps next to the root and the rate outside the buffer."""
    n = mean = delta = 0.0
    g = yield p
    while True:
        g = g + weight_decay * p
        n = alpha * n + (1 - alpha) * g * g
        mean = alpha * mean + (1 - alpha) * g
        step = g / (sqrt(n - mean * mean if centered else n) + eps)
        delta = momentum * delta + step
        p = p - lr * delta
        g = yield p


def adam(p, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
    """Kingma and Ba 2015, algorithm 1, line by line; the weight decay is added to the gradient."""
    m, v, t = 0.0, 0.0, 0
    g = yield p
    while True:
        t += 1
        g = g + weight_decay * p
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        m_hat = m / (1 - betas[0] ** t)
        v_hat = v / (1 - betas[1] ** t)
        p = p - lr * m_hat / (sqrt(v_hat) + eps)
        g = yield p


def adamw(p, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
    """Loshchilov and Hutter 2019, algorithm 2, with eta_t lambda = lr weight_decay."""
    without = adam(0.0, lr, betas, eps)
    before = next(without)
    g = yield p
    while True:
        after = without.send(g)
        p = p - lr * weight_decay * p + (after - before)
        before = after
        g = yield p
