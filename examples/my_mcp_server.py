"""An MCP server with a state, the basket of one trajectory: `tool.mcp=examples/mcp.json`."""

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations

PRICES = {"apple": 2, "bread": 4, "cheese": 7}

server = MCPServer("shop")
basket: dict[str, int] = {}


@server.tool()
def add_to_basket(item: str, count: int = 1) -> str:
    """Puts items into the basket: apple, bread or cheese."""
    if item not in PRICES:
        raise ToolError(f"there is no {item}, only {', '.join(PRICES)}")
    basket[item] = basket.get(item, 0) + count
    return f"{basket[item]} {item}"


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def total_price() -> str:
    """Returns the price of the basket."""
    return str(sum(PRICES[item] * count for item, count in basket.items()))


if __name__ == "__main__":
    server.run()
