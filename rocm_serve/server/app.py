"""The HTTP application over one engine client."""

from __future__ import annotations

from fastapi import FastAPI

from rocm_serve.server import admin, chat, completions, token_routes
from rocm_serve.server.context import Context
from rocm_serve.server.errors import install_error_handlers
from rocm_serve.server.info import EngineClientProtocol, ServerInfo
from rocm_serve.tokens.tokenizer import Tokenizer
from rocm_serve.version import VERSION


def create_app(client: EngineClientProtocol, tokenizer: Tokenizer, info: ServerInfo) -> FastAPI:
    """Return the app. It serves /health at once and requests as soon as `client` is ready.

    Errors: UserError if the model's chat template does not compile. `app.state.context` is for `server.run`.
    """
    context = Context.build(client, tokenizer, info)
    app = FastAPI(title="rocm_serve", version=VERSION, redoc_url=None, redirect_slashes=False)
    app.state.context = context
    install_error_handlers(app)
    for module in (completions, chat, token_routes, admin):
        app.include_router(module.build_router(context))
    return app
