// Sends the key as JSON, which no form of another site can, and shows what was behind the door.
"use strict";

const form = document.getElementById("login");
const said = document.getElementById("said");

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  said.textContent = "";
  const body = JSON.stringify({ key: document.getElementById("key").value });
  try {
    const response = await fetch("admin/login", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body,
    });
    if (response.ok) location.reload();
    else said.textContent = (await response.json()).error.message;
  } catch {
    said.textContent = "The server does not answer.";
  }
});
