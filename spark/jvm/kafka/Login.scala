package penstock.kafka

import java.io.IOException
import java.net.InetAddress
import java.nio.charset.StandardCharsets.UTF_8
import java.nio.file.{Files, NoSuchFileException, Paths}
import java.util.{List => Entries, Map => Settings, Set => Scopes}
import javax.security.auth.callback.{Callback, NameCallback, PasswordCallback, UnsupportedCallbackException}
import javax.security.auth.login.AppConfigurationEntry
import org.apache.kafka.common.security.auth.{AuthenticateCallbackHandler, SaslExtensionsCallback}
import org.apache.kafka.common.security.oauthbearer.{OAuthBearerToken, OAuthBearerTokenCallback}
import org.apache.kafka.common.security.scram.ScramExtensionsCallback
import scala.jdk.CollectionConverters._

/** The login of Kafka's clients: each new connection, and each that logs in again, has the secret as it is now. Kafka's own way
  * reads it when a client is made, and Spark keeps clients as long as it lives.
  *
  * The options of the JAAS entry have places of secrets, never secrets: `spark/brokers/kafka_login.py` makes them. Thread-safe.
  */
class Login extends AuthenticateCallbackHandler {
  @volatile private var options: Map[String, String] = Map.empty

  override def configure(settings: Settings[String, _], mechanism: String, entries: Entries[AppConfigurationEntry]): Unit =
    options = entries.get(0).getOptions.asScala.map { case (name, value) => name -> value.toString }.toMap

  override def close(): Unit = ()

  override def handle(callbacks: Array[Callback]): Unit = callbacks.foreach {
    case name: NameCallback                              => name.setName(options("user"))
    case word: PasswordCallback                          => word.setPassword(Secret.read(options).toCharArray)
    case token: OAuthBearerTokenCallback                 => token.token(new BearerToken(find()))
    case _: SaslExtensionsCallback | _: ScramExtensionsCallback => () // there are none
    case other                                           => throw new UnsupportedCallbackException(other)
  }

  /** The token, and when it ends. */
  private def find(): (String, Long) =
    if (!options.contains("region")) Tokens.get(options, Secret.read(options))
    else
      try MskToken.make(options("region"))
      catch { // the jars are those of the login at the start
        case _: NoClassDefFoundError => throw new IOException("AWS's SDK is not loaded. Try: restart the transform")
      }
}

/** At the start of a client, when no connection needs a token yet. */
class NoLogin extends AuthenticateCallbackHandler {
  override def configure(settings: Settings[String, _], mechanism: String, entries: Entries[AppConfigurationEntry]): Unit = ()
  override def handle(callbacks: Array[Callback]): Unit = ()
  override def close(): Unit = ()
}

private class BearerToken(found: (String, Long)) extends OAuthBearerToken {
  override def value: String = found._1
  override def lifetimeMs: Long = found._2
  override def scope: Scopes[String] = Scopes.of()
  override def principalName: String = "penstock"
  override def startTimeMs: java.lang.Long = null
}

private object Secret {
  private val Note = "(?m)^[ \\t]*#[ \\t]*expires\\b.*$".r

  /** The one line of the file or variable that the options name, as `services.core.security.credentials.read_value`. */
  def read(options: Map[String, String]): String = {
    val (where, content) = options.get("env") match {
      case Some(name) => s"the variable $name" -> Option(System.getenv(name)).getOrElse(missing(s"the variable $name"))
      case None       => options("file") -> new String(Content.of(options("file")), UTF_8)
    }
    val value = Note.replaceAllIn(content, "").trim
    if (value.isEmpty) throw new IOException(s"$where is empty")
    value
  }

  def missing(what: String): Nothing = {
    val host = InetAddress.getLocalHost.getHostName
    throw new IOException(
      s"$what is not on $host. Try: the same files at the same paths on every host with executors, as in docs/clusters.md"
    )
  }
}

private object Content {
  def of(path: String): Array[Byte] =
    try Files.readAllBytes(Paths.get(path))
    catch { case _: NoSuchFileException => Secret.missing(path) }
}
