"""An MCP server of which one tool has a schema that is none."""

import asyncio

import mcp_types as types
from mcp.server import Server
from mcp.server.stdio import stdio_server

SCHEMAS = {"odd": {"type": "object", "properties": {"a": {"type": "nonsense"}}}, "even": {}}


async def list_tools(ctx, params):
    tools = [
        types.Tool(name=name, input_schema={"type": "object", **schema})
        for name, schema in SCHEMAS.items()
    ]
    return types.ListToolsResult(tools=tools)


async def main():
    server = Server("odd", on_list_tools=list_tools)
    async with stdio_server() as streams:
        await server.run(*streams, server.create_initialization_options())


if __name__ == "__main__":
    asyncio.run(main())
