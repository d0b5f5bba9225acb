"""Wrappers for step forward: see ``planted``."""

import copy
import functools

import torch
import torch.distributed as dist
from planted import Planted, fault, right
from torch import nn

from ddp_teach.steps import ForwardOnly

FORWARD = Planted("forward")


@right(FORWARD)
class Plain(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


@right(FORWARD)
class ByAddModule(nn.Module):
    def __init__(self, module, **options):
        super().__init__()
        self.add_module("module", module)

    def __call__(self, *args, **kwargs):
        return self.module(*args, **kwargs)


@right(FORWARD)
class ByInheritance(Plain):
    def forward(self, *inputs, **kwargs):
        outputs = super().forward(*inputs, **kwargs)
        return outputs


RIGHT_ELSEWHERE = [ForwardOnly, nn.parallel.DistributedDataParallel]


@fault(FORWARD, "wrapper(x, y) raised TypeError", "*inputs, **kwargs")
class OneInput(Plain):
    def forward(self, x):
        return self.module(x)


@fault(FORWARD, "scale=2.0", "raised TypeError", "**kwargs")
class NoKeywords(Plain):
    def forward(self, *inputs):
        return self.module(*inputs)


@fault(FORWARD, "Keyword arguments are lost")
class KeywordsDropped(Plain):
    def forward(self, *inputs, **kwargs):
        return self.module(*inputs)


@fault(FORWARD, "arguments do not arrive as they were given", rare=True)
class OnlyTheFirst(Plain):
    def forward(self, *inputs, **kwargs):
        return self.module(*inputs[:1], **kwargs)


@fault(FORWARD, "arguments do not arrive as they were given", rare=True)
class NotUnpacked(Plain):
    def forward(self, *inputs, **kwargs):
        return self.module(inputs, **kwargs)


@fault(FORWARD, "a copy or a part of it")
class Copied(Plain):
    def forward(self, *inputs, **kwargs):
        return self.module(*[x.clone() if torch.is_tensor(x) else x for x in inputs], **kwargs)


@fault(FORWARD, "returns nothing")
class NoReturn(Plain):
    def forward(self, *inputs, **kwargs):
        self.module(*inputs, **kwargs)


@fault(FORWARD, "wraps the output in a tuple")
class ATuple(Plain):
    def forward(self, *inputs, **kwargs):
        return (self.module(*inputs, **kwargs),)


@fault(FORWARD, "changes what the module returned", rare=True)
class OnlyTheFirstOutput(Plain):
    def forward(self, *inputs, **kwargs):
        out = self.module(*inputs, **kwargs)
        return out[0] if isinstance(out, tuple) else out


@fault(FORWARD, "never calls the module", rare=True)
class GivesBackInput(Plain):
    def forward(self, *inputs, **kwargs):
        return inputs[0] if inputs else None


@fault(FORWARD, "calls the module more than once")
class Twice(Plain):
    def forward(self, *inputs, **kwargs):
        self.module(*inputs, **kwargs)
        return self.module(*inputs, **kwargs)


@fault(FORWARD, "cut off from the computation")
class Detached(Plain):
    def forward(self, *inputs, **kwargs):
        out = self.module(*inputs, **kwargs)
        return out.detach() if torch.is_tensor(out) and out.grad_fn is not None else out


@fault(FORWARD, "cut off from the computation", rare=True)
class WithoutGradients(Plain):
    @torch.no_grad()
    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)


@fault(FORWARD, "forward hooks do not run")
class PastTheHooks(Plain):
    def forward(self, *inputs, **kwargs):
        return self.module.forward(*inputs, **kwargs)


@fault(FORWARD, "cannot assign module before Module.__init__", "super().__init__()")
class NoSuper(nn.Module):
    def __init__(self, module):
        self.module = module

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)


@fault(FORWARD, "no attribute module")
class AnotherName(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.model = module

    def forward(self, *inputs, **kwargs):
        return self.model(*inputs, **kwargs)


@fault(FORWARD, "not registered")
class NotRegistered(nn.Module):
    def __init__(self, module):
        super().__init__()
        object.__setattr__(self, "module", module)

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)


@fault(FORWARD, "not the module that was given", "list")
class InAList(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = [module]

    def forward(self, *inputs, **kwargs):
        return self.module[0](*inputs, **kwargs)


@fault(FORWARD, "not the module that was given", "partial", rare=True)
class AFunction(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = functools.partial(module)

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)


@fault(FORWARD, "parameters", "no others")
class OwnParameter(Plain):
    def __init__(self, module):
        super().__init__(module)
        self.scale = nn.Parameter(torch.ones(1))


@fault(FORWARD, "do not reach the module", "eval()")
class EvalStaysOutside(Plain):
    def train(self, mode=True):
        self.training = mode
        return self


@fault(FORWARD, "NoConstructor(module) raised TypeError")
class NoConstructor(nn.Module):
    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)


@fault(FORWARD, "raised", "forward", rare=True)
class NoForward(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


@right(FORWARD)
class KeepsItTwice(Plain):
    def __init__(self, module):
        nn.Module.__init__(self)
        self.net = module
        self.module = module


@right(FORWARD)
class ByProperty(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.wrapped = module

    @property
    def module(self):
        return self.wrapped

    def forward(self, *inputs, **kwargs):
        return self.wrapped(*inputs, **kwargs)


@fault(FORWARD, "does not return the output in every mode")
class ReturnsOnlyInTraining(Plain):
    def forward(self, *inputs, **kwargs):
        output = self.module(*inputs, **kwargs)
        if self.training:
            return output


@fault(FORWARD, "changes its inputs in place")
class ScalesInputs(Plain):
    @torch.no_grad()
    def scale(self, x):
        x /= 2

    def forward(self, *inputs, **kwargs):
        for x in inputs:
            if torch.is_tensor(x):
                self.scale(x)
        return self.module(*inputs, **kwargs)


@fault(FORWARD, "never calls the module that was given", "self.module = module", rare=True)
class KeepsACopy(Plain):
    def __init__(self, module):
        super().__init__(copy.deepcopy(module))


@fault(FORWARD, "arrive as a dict", "two stars", rare=True)
class KeywordsInADict(Plain):
    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, kwargs)


@fault(FORWARD, "On rank 1: forward never calls the module", rare=True)
class OnlyOnRank0(Plain):
    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs) if dist.get_rank() == 0 else None


@fault(FORWARD, "has frozen parameters", rare=True)
class Freezes(Plain):
    def __init__(self, module):
        super().__init__(module.requires_grad_(False))


@fault(FORWARD, "forward sets another mode", rare=True)
class AlwaysInEvalMode(Plain):
    def forward(self, *inputs, **kwargs):
        return self.module.eval()(*inputs, **kwargs)
